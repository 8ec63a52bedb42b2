//! The directory of generations that a command means, and the name that one is known by in it.

use std::path::{Path, PathBuf};

use super::args::RootArgs;
use super::output;
use super::target;
use crate::disk::{self, Store};
use crate::error::{Error, Kind, Result, shown};
use crate::hub::ModelDir;
use crate::registry::{BaseDir, Environment, Name};
use crate::view;

/// The option that names it.
const OPTION: &str = "--cache-root";

/// A directory of generations, which need not exist.
#[derive(Clone, Debug)]
pub(super) struct Root {
    pub(super) path: PathBuf,
    /// In BASE, and so for nobody but its owner. What was chosen with `--cache-root` goes by the umask.
    pub(super) is_private: bool,
}

impl Root {
    /// What `args` name, for a command that makes nothing.
    pub(super) fn find(args: &RootArgs) -> Result<Root> {
        match Root::explicit(args.cache_root.as_deref())? {
            Some(root) => Ok(root),
            None => Ok(Root::in_base(&target::find_base(&args.base)?)),
        }
    }

    /// What was given with `--cache-root`, absolute.
    pub(super) fn explicit(given: Option<&Path>) -> Result<Option<Root>> {
        let absolute = |path| Environment::of_process().absolute(path, OPTION);
        let path = given.map(absolute).transpose()?;
        Ok(path.map(|path| Root { path, is_private: false }))
    }

    /// The one of a BASE.
    pub(super) fn in_base(base: &BaseDir) -> Root {
        Root { path: base.model_cache_dir(), is_private: true }
    }

    /// Makes what `args` name, apart from `source`: nothing is made before that is known.
    pub(super) fn make(args: &RootArgs, source: &Path) -> Result<Store> {
        if let Some(root) = Root::explicit(args.cache_root.as_deref())? {
            return root.create(source);
        }
        let environment = Environment::of_process();
        let base_dir = args.base.base_dir.as_deref();
        Root::in_base(&BaseDir::find(base_dir, &environment)?).check(source)?;
        let base = BaseDir::prepare(base_dir, &environment)?;
        if let Some(reason) = base.fallback_reason() {
            output::note(&format!("using {} for caches: {reason}", shown(base.path())));
        }
        // It is another one where the default can't be created after all.
        Root::in_base(&base).create(source)
    }

    /// Makes it, apart from `source`.
    pub(super) fn create(&self, source: &Path) -> Result<Store> {
        self.check(source)?;
        Store::create(&self.path, self.is_private)
    }

    /// Refuses a root inside the source, which would then be written to, and one around it: what is copied would be
    /// among the copies.
    pub(super) fn check(&self, source: &Path) -> Result<()> {
        // A link of the user's own that stands for the root is followed.
        let path = std::fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone());
        view::check_outside(&path, OPTION, source)?;
        match view::check_outside(source, OPTION, &path) {
            Err(error) if error.kind() == Kind::Usage => {
                let (root, source) = (shown(&self.path), shown(source));
                Err(Error::new(Kind::Usage, format!("{OPTION} {root} would be around the source {source}"))
                    .hint(format!("choose another {OPTION}, apart from it")))
            }
            // A root that does not exist holds nothing.
            Err(error) if error.kind() == Kind::NotFound => Ok(()),
            outcome => outcome,
        }
    }

    /// What is there; `None` where nothing is.
    pub(super) fn open(&self) -> Result<Option<Store>> {
        match Store::open(&self.path) {
            Err(error) if error.kind() == Kind::NotFound => Ok(None),
            store => store.map(Some),
        }
    }
}

/// The name of a model's generations: the one given, else that of its directory.
pub(super) fn name_of(given: Option<&Name>, model: &ModelDir) -> Name {
    given.cloned().unwrap_or_else(|| disk::default_name(model))
}
