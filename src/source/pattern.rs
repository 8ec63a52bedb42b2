//! Patterns: what a glob on the command line means for a file and for a directory.
//!
//! One rule for all four options: a pattern without `/` is compared with names at any depth, one with
//! `/` with the path relative to the model directory, where `*`, `?` and `[…]` never match a `/` and
//! `**` stands for any number of directories. `./name` is `name` at the top only. A pattern that ends
//! in `/` names directories. A leading dot is nothing special. Letters are compared as they are.
//!
//! * Exclusions and `--passthrough`: what matches is meant together with everything below it.
//! * `--pattern`: files that match. A directory that is named without a wildcard in its last part
//!   (`original`, `unet/`, `*/original`) is meant with everything below it; `unet/*` is the files
//!   directly in it and `unet/**` all of them.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use globset::{Candidate, GlobBuilder, GlobMatcher, GlobSet, GlobSetBuilder};

use crate::error::{Error, Kind, Result, shown};

/// One pattern, taken apart.
struct Pattern {
    /// Without a leading `./`, a trailing `/` and empty parts.
    glob: String,
    /// Compared with the relative path instead of the name.
    anchored: bool,
    /// Ended in `/`.
    directory_only: bool,
}

impl Pattern {
    fn parse(option: &str, given: &str) -> Result<Pattern> {
        let wrong = |why: &str| Error::new(Kind::Usage, format!("{option} {}: {why}", shown(given)));
        if given.starts_with('/') {
            return Err(wrong("a pattern is relative to the model directory, this one starts with '/'")
                .hint(format!(
                    "write {} for something at the top of it",
                    shown(format!("./{}", given.trim_start_matches('/')))
                )));
        }
        check_syntax(given).map_err(wrong)?;
        let parts: Vec<&str> = given.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
        if parts.is_empty() {
            return Err(wrong("the pattern is empty").hint("'*' matches every file"));
        }
        if parts.contains(&"..") {
            return Err(wrong("a pattern cannot lead out of the model directory"));
        }
        Ok(Pattern {
            glob: parts.join("/"),
            anchored: given.trim_end_matches('/').contains('/'),
            directory_only: given.ends_with('/'),
        })
    }

    /// The last part has no wildcard, so that a directory can be meant by its name.
    fn names_its_last_part(&self) -> bool {
        !has_wildcard(self.glob.rsplit('/').next().unwrap_or(&self.glob))
    }
}

/// What the glob library takes without an error, but not as it is meant.
fn check_syntax(glob: &str) -> std::result::Result<(), &'static str> {
    let mut characters = glob.chars();
    let mut braces = 0;
    let mut last = None;
    while let Some(character) = characters.next() {
        match character {
            '\\' => {
                characters.next();
            }
            '[' => check_class(&mut characters)?,
            '{' => braces += 1,
            ',' | '}' if braces > 0 && last == Some('/') => {
                return Err("an alternative in braces cannot end in '/': give one option for each");
            }
            '}' => braces -= 1,
            _ => {}
        }
        last = Some(character);
    }
    Ok(())
}

/// Reads to the end of a class. The library compares bytes, so that a class would match one byte out of
/// a character that is not ASCII.
fn check_class(characters: &mut std::str::Chars<'_>) -> std::result::Result<(), &'static str> {
    // A `]` right after the opening bracket stands for itself.
    let mut first = true;
    for inside in characters {
        if !inside.is_ascii() {
            return Err("only ASCII characters can stand inside [...]");
        }
        if inside == ']' && !first {
            break;
        }
        first = first && matches!(inside, '!' | '^');
    }
    Ok(())
}

fn has_wildcard(part: &str) -> bool {
    let mut escaped = false;
    part.chars().any(|character| {
        let wildcard = !escaped && matches!(character, '*' | '?' | '[' | '{');
        escaped = !escaped && character == '\\';
        wildcard
    })
}

/// What a pattern can mean.
#[derive(Clone, Copy, PartialEq)]
enum Applies {
    File,
    Directory,
    Both,
}

/// Patterns of one option or of several that do the same, in the order given.
pub(super) struct Globs {
    given: Vec<(&'static str, String)>,
    names: Set,
    paths: Set,
}

impl Globs {
    /// Exclusions and `--passthrough`: each `(option, pattern)` is meant with everything below it.
    pub(super) fn leaving_out<'a>(
        patterns: impl IntoIterator<Item = (&'static str, &'a str)>,
    ) -> Result<Globs> {
        let mut builder = Builder::new();
        for (option, given) in patterns {
            let pattern = Pattern::parse(option, given)?;
            let applies = if pattern.directory_only { Applies::Directory } else { Applies::Both };
            builder.add(option, given, &pattern.glob, pattern.anchored, applies)?;
            // Where everything in a directory is left out there is no reason to enter it, and none to
            // fail because it cannot be entered.
            let all_of = pattern.glob.strip_suffix("/**").or_else(|| pattern.glob.strip_suffix("/*"));
            if let (Some(directory), false) = (all_of, pattern.directory_only) {
                builder.add(option, given, directory, true, Applies::Directory)?;
            }
            builder.given.push((option, given.to_owned()));
        }
        builder.build()
    }

    /// The index of the first pattern that matches this file or directory itself.
    pub(super) fn find(&self, path: &Path, is_directory: bool) -> Option<usize> {
        let name = path.file_name().unwrap_or(OsStr::new(""));
        let by_name = self.names.find(name.as_bytes(), is_directory);
        let by_path = self.paths.find(path.as_os_str().as_bytes(), is_directory);
        by_name.into_iter().chain(by_path).min()
    }

    /// This file is matched, or a directory above it.
    pub(super) fn cover(&self, file: &Path) -> bool {
        self.find(file, false).is_some()
            || file
                .ancestors()
                .skip(1)
                .any(|above| !above.as_os_str().is_empty() && self.find(above, true).is_some())
    }

    /// The pattern behind an index, as given.
    pub(super) fn given(&self, index: usize) -> &str {
        &self.given[index].1
    }

    /// The option that gave a pattern first.
    pub(super) fn option_of(&self, pattern: &str) -> &'static str {
        self.given.iter().find(|row| row.1 == pattern).map_or("--exclude", |row| row.0)
    }

    /// The patterns, as given.
    pub(super) fn patterns(&self) -> impl Iterator<Item = &str> {
        self.given.iter().map(|(_, pattern)| pattern.as_str())
    }
}

/// Globs compared with one kind of text.
struct Set {
    globs: GlobSet,
    rules: Vec<(usize, Applies)>,
}

impl Set {
    fn find(&self, text: &[u8], is_directory: bool) -> Option<usize> {
        if self.rules.is_empty() {
            return None;
        }
        let candidate = Candidate::from_bytes(text);
        if !self.globs.is_match_candidate(&candidate) {
            return None;
        }
        let wrong = if is_directory { Applies::File } else { Applies::Directory };
        let matching = self.globs.matches_candidate(&candidate);
        matching.into_iter().map(|index| self.rules[index]).find(|rule| rule.1 != wrong).map(|rule| rule.0)
    }
}

struct Builder {
    given: Vec<(&'static str, String)>,
    names: (GlobSetBuilder, Vec<(usize, Applies)>),
    paths: (GlobSetBuilder, Vec<(usize, Applies)>),
}

impl Builder {
    fn new() -> Builder {
        let empty = || (GlobSetBuilder::new(), Vec::new());
        Builder { given: Vec::new(), names: empty(), paths: empty() }
    }

    /// Adds a glob for the pattern that is pushed to `given` next.
    fn add(
        &mut self,
        option: &'static str,
        given: &str,
        glob: &str,
        anchored: bool,
        applies: Applies,
    ) -> Result<()> {
        let (set, rules) = if anchored { &mut self.paths } else { &mut self.names };
        // Names hold no `/`. Without the option the library finds extensions by a table.
        set.add(compile(option, given, glob, anchored)?);
        rules.push((self.given.len(), applies));
        Ok(())
    }

    fn build(self) -> Result<Globs> {
        let too_large = |cause: globset::Error| {
            Error::new(Kind::Usage, format!("the patterns are too large together: {}", cause.kind()))
        };
        Ok(Globs {
            given: self.given,
            names: Set { globs: self.names.0.build().map_err(too_large)?, rules: self.names.1 },
            paths: Set { globs: self.paths.0.build().map_err(too_large)?, rules: self.paths.1 },
        })
    }
}

fn compile(option: &str, given: &str, glob: &str, literal_separator: bool) -> Result<globset::Glob> {
    GlobBuilder::new(glob)
        .literal_separator(literal_separator)
        .empty_alternates(true)
        .backslash_escape(true)
        .build()
        .map_err(|cause| Error::new(Kind::Usage, format!("{option} {}: {}", shown(given), cause.kind())))
}

/// The patterns of `--pattern`.
pub(super) struct Inclusions {
    globs: Globs,
    routes: Vec<Route>,
}

impl Inclusions {
    /// No pattern at all means every file.
    pub(super) fn new<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Result<Inclusions> {
        const OPTION: &str = "--pattern";
        let mut builder = Builder::new();
        let mut routes = Vec::new();
        for given in patterns {
            let pattern = Pattern::parse(OPTION, given)?;
            let applies = match (pattern.directory_only, pattern.names_its_last_part()) {
                (true, _) => Applies::Directory,
                (false, true) => Applies::Both,
                (false, false) => Applies::File,
            };
            builder.add(OPTION, given, &pattern.glob, pattern.anchored, applies)?;
            routes.push(Route::of(&pattern));
            builder.given.push((OPTION, given.to_owned()));
        }
        Ok(Inclusions { globs: builder.build()?, routes })
    }

    /// Every file is taken.
    pub(super) fn takes_all(&self) -> bool {
        self.globs.given.is_empty()
    }

    /// The pattern that takes this file, or this directory with everything below it.
    pub(super) fn find(&self, path: &Path, is_directory: bool) -> Option<usize> {
        self.globs.find(path, is_directory)
    }

    /// Something below this directory may be taken.
    pub(super) fn may_lead_into(&self, directory: &Path) -> bool {
        self.takes_all() || self.routes.iter().any(|route| route.goes_through(directory) != Passage::No)
    }

    /// A pattern leads through exactly this path, so that it matters whether it is there.
    pub(super) fn name_as_directory(&self, path: &Path) -> bool {
        self.find(path, true).is_some()
            || self.routes.iter().any(|route| route.goes_through(path) == Passage::ByName)
    }

    /// The patterns, as given.
    pub(super) fn patterns(&self) -> impl Iterator<Item = &str> {
        self.globs.patterns()
    }

    /// This file is taken, by itself or with a directory above it.
    pub(super) fn cover(&self, file: &Path) -> bool {
        self.takes_all() || self.globs.cover(file)
    }
}

/// The directories that a pattern leads through.
enum Route {
    /// A name at any depth, or alternatives with a `/` in them: any directory may hold a match.
    Anywhere,
    /// One matcher for each part of the path, `None` for `**`.
    Parts(Vec<Option<GlobMatcher>>),
}

#[derive(Clone, Copy, PartialEq)]
enum Passage {
    No,
    /// Behind a `**`, or by a name at any depth.
    Perhaps,
    /// Part by part.
    ByName,
}

impl Route {
    fn of(pattern: &Pattern) -> Route {
        let splits_a_group = pattern.glob.split('/').any(|part| {
            part.matches('{').count() != part.matches('}').count()
                || part.matches('[').count() != part.matches(']').count()
        });
        if !pattern.anchored || splits_a_group {
            return Route::Anywhere;
        }
        let matcher = |part: &str| match part {
            "**" => Ok(None),
            _ => compile("--pattern", part, part, true).map(|glob| Some(glob.compile_matcher())),
        };
        // A part that is no glob by itself belongs to an escape such as `a\/b`.
        pattern.glob.split('/').map(matcher).collect::<Result<_>>().map_or(Route::Anywhere, Route::Parts)
    }

    fn goes_through(&self, directory: &Path) -> Passage {
        let Route::Parts(parts) = self else { return Passage::Perhaps };
        let mut parts = parts.iter();
        for name in directory.iter() {
            match parts.next() {
                Some(Some(matcher)) if matcher.is_match(Path::new(name)) => {}
                Some(None) => return Passage::Perhaps,
                _ => return Passage::No,
            }
        }
        if parts.next().is_some() { Passage::ByName } else { Passage::No }
    }
}

/// The option that leaves out exactly this file or directory, to be copied into a shell.
pub(super) fn flag_leaving_out(path: &str, is_directory: bool) -> String {
    flag(&literal(path, is_directory))
}

/// The pattern that matches exactly this path.
pub(super) fn literal(path: &str, is_directory: bool) -> String {
    let top = if path.contains('/') { "" } else { "./" };
    format!("{top}{}{}", escape(path), if is_directory { "/" } else { "" })
}

/// A glob that matches just this text.
pub(super) fn escape(text: &str) -> String {
    // The library's own escape puts brackets around what is special and forgets the backslash.
    globset::escape(text).replace('\\', "\\\\")
}

/// `--also-exclude` with a pattern in quotes that a shell takes off again.
pub(super) fn flag(pattern: &str) -> String {
    format!("--also-exclude '{}'", pattern.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn leaves_out(pattern: &str, path: &str, is_directory: bool) -> bool {
        let globs = Globs::leaving_out([("--exclude", pattern)]).unwrap();
        globs.find(Path::new(path), is_directory).is_some()
    }

    fn includes(pattern: &str, path: &str, is_directory: bool) -> bool {
        Inclusions::new([pattern]).unwrap().find(Path::new(path), is_directory).is_some()
    }

    #[test]
    fn a_name_matches_at_any_depth_and_a_path_from_the_top() {
        for (pattern, path, expected) in [
            ("*.bin", "a.bin", true),
            ("*.bin", "deep/er/a.bin", true),
            ("*.bin", "a.bin.json", false),
            ("*.bin", ".bin", true),
            ("*", ".hidden", true),
            ("*.BIN", "a.bin", false),
            ("./a.bin", "a.bin", true),
            ("./a.bin", "sub/a.bin", false),
            ("sub/*.bin", "sub/a.bin", true),
            ("sub/*.bin", "sub/sub/a.bin", false),
            ("sub/*.bin", "other/sub/a.bin", false),
            ("**/sub/*.bin", "other/sub/a.bin", true),
            ("sub/**/a.bin", "sub/a.bin", true),
            ("sub/**/a.bin", "sub/x/y/a.bin", true),
            ("**", "x/y", true),
            ("s?b/a[0-9].bin", "sub/a7.bin", true),
            ("s?b/a[!0-9].bin", "sub/a7.bin", false),
            ("a[!x]b", "a/b", false),
            ("sub/a?b", "sub/a/b", false),
            ("*.{bin,pth}", "x.pth", true),
            ("model{,.index}.json", "model.json", true),
            (r"\*.bin", "*.bin", true),
            (r"\*.bin", "a.bin", false),
            ("模型*", "模型.bin", true),
            (".*.sw?", ".a.swp", true),
            ("*~", "a~", true),
        ] {
            assert_eq!(leaves_out(pattern, path, false), expected, "{pattern} on {path}");
            assert_eq!(includes(pattern, path, false), expected, "--pattern {pattern} on {path}");
        }
    }

    #[test]
    fn exclusions_match_directories() {
        for (pattern, directory, expected) in [
            ("original", "original", true),
            ("original", "a/original", true),
            ("original/", "a/original", true),
            ("original/*", "original", true),
            ("original/**", "original", true),
            ("original/**", "a/original", false),
            ("a/original/", "a/original", true),
            ("./original/", "a/original", false),
            ("checkpoint-*/", "checkpoint-500", true),
            ("original/*.bin", "original", false),
        ] {
            assert_eq!(leaves_out(pattern, directory, true), expected, "{pattern} on {directory}/");
        }
        assert!(!leaves_out("original/", "original", false), "a file is no directory");
        assert!(!leaves_out("original/**", "original", false));
    }

    #[test]
    fn inclusions_take_directories_that_they_name() {
        for (pattern, directory, expected) in [
            ("original", "original", true),
            ("original", "a/original", true),
            ("unet/", "a/unet", true),
            ("a/unet", "a/unet", true),
            ("*/unet", "b/unet", true),
            ("un*/", "unet", true),
            ("un*", "unet", false),
            ("a/*", "a/unet", false),
        ] {
            assert_eq!(includes(pattern, directory, true), expected, "{pattern} on {directory}/");
        }
    }

    #[test]
    fn inclusions_know_where_they_lead() {
        for (pattern, directory, expected) in [
            ("*.json", "any/where", true),
            ("a/b/*.json", "a", true),
            ("a/b/*.json", "a/b", true),
            ("a/b/*.json", "a/b/c", false),
            ("a/b/*.json", "b", false),
            ("a/**/*.json", "a/b/c", true),
            ("./*.json", "a", false),
            ("{a/b,c}/x", "a", true),
        ] {
            let inclusions = Inclusions::new([pattern]).unwrap();
            assert_eq!(
                inclusions.may_lead_into(Path::new(directory)),
                expected,
                "{pattern} into {directory}"
            );
        }
        let inclusions = Inclusions::new(["a/b/*.json"]).unwrap();
        assert!(inclusions.name_as_directory(Path::new("a/b")));
        assert!(!Inclusions::new(["*.json"]).unwrap().name_as_directory(Path::new("a")));
    }

    #[test]
    fn a_wrong_pattern_is_quoted() {
        for (pattern, why) in [
            ("", "empty"),
            ("/", "starts with '/'"),
            ("./", "empty"),
            ("/abs/*.bin", "starts with '/'"),
            ("../x", "out of the model directory"),
            ("a/../x", "out of the model directory"),
            ("[a", "unclosed character class"),
            ("a{b", "unclosed alternate group"),
            ("a}b", "unopened alternate group"),
            ("a\\", "dangling"),
            ("[z-a]", "invalid range"),
            ("{a/,b}", "give one option"),
            ("[模]", "ASCII"),
        ] {
            for error in [
                Globs::leaving_out([("--exclude", pattern)]).map(|_| ()).unwrap_err(),
                Inclusions::new([pattern]).map(|_| ()).unwrap_err(),
            ] {
                let text = format!("{error} {}", error.hint_text().unwrap_or_default());
                assert_eq!(error.kind(), Kind::Usage, "{pattern}");
                assert!(text.contains(why), "{pattern}: {text}");
                assert!(error.message().contains(&shown(pattern)), "{pattern}: {text}");
            }
        }
    }

    #[test]
    fn flags_match_one_path() {
        assert_eq!(flag_leaving_out("a", false), "--also-exclude './a'");
        assert_eq!(flag_leaving_out("it's", true), r"--also-exclude './it'\''s/'");
        let name = "od[d]*{n}?/f\\x";
        assert!(leaves_out(&literal(name, false), name, false));
        for name in ["a/,b{c", "a/}b", "模/[]"] {
            assert!(leaves_out(&literal(name, false), name, false), "{name}");
        }
    }

    /// Glob matching in its simplest form: characters against characters.
    fn naive_name(glob: &[u8], name: &[u8]) -> bool {
        match (glob.first(), name.first()) {
            (None, None) => true,
            (Some(b'*'), _) => {
                naive_name(&glob[1..], name) || (!name.is_empty() && naive_name(glob, &name[1..]))
            }
            (Some(b'?'), Some(_)) => naive_name(&glob[1..], &name[1..]),
            (Some(wanted), Some(found)) => wanted == found && naive_name(&glob[1..], &name[1..]),
            _ => false,
        }
    }

    /// The same part by part. A `**` at the end needs something to stand for.
    fn naive_path(glob: &[&str], path: &[&str]) -> bool {
        match (glob.first(), path.first()) {
            (None, None) => true,
            (Some(&"**"), None) => false,
            (Some(&"**"), Some(_)) if glob.len() == 1 => true,
            (Some(&"**"), Some(_)) => naive_path(&glob[1..], path) || naive_path(glob, &path[1..]),
            (Some(part), Some(name)) => {
                naive_name(part.as_bytes(), name.as_bytes()) && naive_path(&glob[1..], &path[1..])
            }
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn globs_agree_with_the_naive_matcher(
            glob in prop::collection::vec(prop_oneof![3 => "[ab.*?]{1,4}", 1 => Just("**".to_owned())], 1..4),
            path in prop::collection::vec("[ab.]{1,4}", 1..5),
        ) {
            prop_assume!(glob.iter().chain(&path).all(|part| part != "." && part != ".."));
            // Two stars inside a name are one.
            prop_assume!(glob.iter().all(|part| part == "**" || !part.contains("**")));
            prop_assume!(!glob.windows(2).any(|pair| pair[0] == "**" && pair[1] == "**"));
            let parts: Vec<&str> = glob.iter().map(String::as_str).collect();
            let names: Vec<&str> = path.iter().map(String::as_str).collect();
            let expected = match parts[..] {
                [name] => naive_name(name.as_bytes(), names[names.len() - 1].as_bytes()),
                _ => naive_path(&parts, &names),
            };
            prop_assert_eq!(includes(&glob.join("/"), &path.join("/"), false), expected);
            prop_assert_eq!(leaves_out(&glob.join("/"), &path.join("/"), false), expected);
            // Whatever can match a file must lead through each directory above it.
            if expected {
                let inclusions = Inclusions::new([glob.join("/").as_str()]).unwrap();
                for depth in 1..names.len() {
                    let above = names[..depth].join("/");
                    prop_assert!(inclusions.may_lead_into(Path::new(&above)), "{above}");
                }
            }
        }

        #[test]
        fn any_text_is_a_pattern_or_an_error(text in ".{0,12}", path in "[a-c/.]{1,12}") {
            if let Ok(inclusions) = Inclusions::new([text.as_str()]) {
                inclusions.find(Path::new(&path), false);
                inclusions.may_lead_into(Path::new(&path));
            }
            let _ = Globs::leaving_out([("--exclude", text.as_str())]);
        }

        #[test]
        fn a_literal_matches_its_own_path(path in "[a,!^\\[\\]{}*?\\\\'é -]{1,6}(/[a,\\[\\]{}*\\\\]{1,4})?", is_directory: bool) {
            prop_assume!(!path.ends_with('/'));
            prop_assert!(leaves_out(&literal(&path, is_directory), &path, is_directory));
            let longer = path.clone() + "x";
            prop_assert!(!leaves_out(&literal(&path, is_directory), &longer, is_directory));
        }
    }
}
