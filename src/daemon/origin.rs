//! Where the bytes of a load come from: the source itself, or a generation of it on disk, which then stands for it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::disk::{Generation, Lease};
use crate::error::{Error, Kind, Result, shown};
use crate::hub;
use crate::manifest::{Digest, SelectionRules};
use crate::memory::Hashing;
use crate::source::{self, SelectedFile, Selection, advice};

/// What is read, and what it stands for.
#[derive(Debug)]
pub struct Origin {
    /// The files of the source: what the cache is known by, from the outside.
    pub source: Selection,
    copy: Option<Copy>,
}

/// A generation, leased.
#[derive(Debug)]
struct Copy {
    generation: Generation,
    /// The files on disk, in the order of the source's.
    files: Selection,
    lease: Lease,
}

impl Origin {
    /// The source itself, as it is now.
    pub fn of_source(source: &Path, rules: &SelectionRules) -> Result<Origin> {
        Ok(Origin { source: source::select(source, rules)?, copy: None })
    }

    /// The generation at `path`, leased, in place of `source`. The source is not looked at: its files are as the
    /// generation notes them.
    ///
    /// # Errors
    ///
    /// [`Kind::NotFound`] where it was removed; [`Kind::Verification`] where a file of it is missing or another.
    pub fn of_generation(path: &Path, source: &Path, rules: &SelectionRules) -> Result<Origin> {
        let generation = Generation::open(path)?;
        // Before its files are looked at: from now on it is not removed.
        let lease = generation.lease()?;
        generation.mark_used();
        let files = generation.selection(&rules.passthrough)?;
        let source = stood_for(&generation, &files, source, rules)?;
        Ok(Origin { source, copy: Some(Copy { generation, files, lease }) })
    }

    /// What is read, file by file in the order of the source's.
    pub fn files(&self) -> &Selection {
        self.copy.as_ref().map_or(&self.source, |copy| &copy.files)
    }

    /// The generation that is read; `None`: the source itself.
    pub fn generation(&self) -> Option<&Path> {
        self.copy.as_ref().map(|copy| copy.generation.path())
    }

    /// The files that the segments stand for, where others are read.
    pub fn stands_for(&self) -> Option<Arc<[SelectedFile]>> {
        self.copy.as_ref().map(|_| self.source.files.as_slice().into())
    }

    /// How the bytes are hashed on `threads` threads, and what they must be: what the generation's manifest says, or
    /// the names of a hub cache.
    pub fn hashing(&self, threads: usize) -> Hashing {
        match &self.copy {
            Some(Copy { generation, .. }) => {
                let path = shown(generation.path());
                Hashing {
                    threads,
                    expected: generation.manifest().files.iter().map(|entry| entry.sha256).collect(),
                    authority: format!("the manifest of {path}"),
                    remedy: format!(
                        "look at all of it with 'iloader verify {path}', and make it anew with --refresh-cache; if that \
                         finds nothing, memory or the device may be faulty"
                    ),
                }
            }
            None => Hashing {
                threads,
                expected: of_hub(&self.source),
                authority: "its name in the hub cache".to_owned(),
                remedy: "remove it there and download it again (hf download)".to_owned(),
            },
        }
    }

    /// What has to be held as long as the cache lives: a lease where links of the view lead into the generation.
    pub fn into_lease(self) -> Option<Lease> {
        let Copy { files, lease, .. } = self.copy?;
        files.files.iter().any(|file| file.passthrough).then_some(lease)
    }
}

/// What the names of a hub cache say of the files of a selection; of a passed-through one, whose bytes are not
/// loaded, nothing.
pub fn of_hub(source: &Selection) -> Vec<Option<Digest>> {
    let digest = |file: &SelectedFile| hub::blob_digest(&file.real).filter(|_| !file.passthrough);
    source.files.iter().map(digest).collect()
}

/// The files of the source that a generation's `files` stand for.
///
/// # Errors
///
/// [`Kind::Verification`] where the two lists are not of the same files.
fn stood_for(
    generation: &Generation,
    files: &Selection,
    source: &Path,
    rules: &SelectionRules,
) -> Result<Selection> {
    let noted = Selection::of_manifest(generation.manifest());
    let is_same = noted.files.len() == files.files.len()
        && noted.files.iter().zip(&files.files).all(|(noted, file)| noted.path == file.path);
    if !is_same {
        let path = shown(generation.path());
        let message = format!("the manifest of {path} lists other files than it holds");
        return Err(Error::new(Kind::Verification, message).hint("make it anew with --refresh-cache"));
    }
    let root: PathBuf = source.to_owned();
    let of_source = |(noted, file): (SelectedFile, &SelectedFile)| SelectedFile {
        real: root.join(&noted.path),
        passthrough: file.passthrough,
        ..noted
    };
    Ok(Selection {
        files: noted.files.into_iter().zip(&files.files).map(of_source).collect(),
        root,
        rules: rules.clone(),
        warnings: advice::warnings(files),
        ..noted
    })
}
