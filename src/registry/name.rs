//! The name of a cache.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use crate::error::{Error, Kind, Result, shown};

/// The most characters that a name may have: file names made of it, with suffixes, stay below 255.
pub const NAME_CHARACTERS_MAX: usize = 96;

/// A cache's name: it starts with an ASCII letter or digit, holds only those and `.`, `_`, `-`, has at
/// most [`NAME_CHARACTERS_MAX`] characters and never `..`. So it is one safe path component, never a
/// hidden file and never an option.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

impl Name {
    /// The nearest name to any text: what a name cannot hold becomes `-`, the end is cut, and where nothing is left
    /// it is `model`.
    pub fn nearest(text: &str) -> Name {
        let mut name = String::new();
        for character in text.chars() {
            let character = if is_allowed(character) { character } else { '-' };
            let is_first = name.is_empty();
            if name.len() == NAME_CHARACTERS_MAX {
                break;
            } else if is_first && !character.is_ascii_alphanumeric() {
                continue;
            }
            let is_second_dot = character == '.' && name.ends_with('.');
            name.push(if is_second_dot { '-' } else { character });
        }
        Name(if name.is_empty() { "model".to_owned() } else { name })
    }

    /// The name as given.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = Error;

    /// # Errors
    ///
    /// [`Kind::Usage`], saying which rule is broken.
    fn from_str(text: &str) -> Result<Name> {
        match broken_rule(text) {
            None => Ok(Name(text.to_owned())),
            Some(rule) => {
                Err(Error::new(Kind::Usage, format!("{} is not a cache name: {rule}", shown(text))).hint(
                    format!(
                        "use ASCII letters, digits, '.', '_' and '-', a letter or digit first, at most \
                     {NAME_CHARACTERS_MAX} characters, without '..'"
                    ),
                ))
            }
        }
    }
}

fn is_allowed(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '.' | '_' | '-')
}

fn broken_rule(text: &str) -> Option<String> {
    let Some(first) = text.chars().next() else {
        return Some("it is empty".to_owned());
    };
    if let Some(character) = text.chars().find(|&c| !is_allowed(c)) {
        return Some(format!("it holds '{}'", character.escape_debug()));
    }
    if !first.is_ascii_alphanumeric() {
        return Some(format!("it starts with '{first}'"));
    }
    if text.contains("..") {
        return Some("it holds '..'".to_owned());
    }
    let characters = text.len();
    (characters > NAME_CHARACTERS_MAX)
        .then(|| format!("it has {characters} characters, and {NAME_CHARACTERS_MAX} is the most"))
}

impl fmt::Display for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl AsRef<OsStr> for Name {
    fn as_ref(&self) -> &OsStr {
        OsStr::new(&self.0)
    }
}

impl AsRef<Path> for Name {
    fn as_ref(&self) -> &Path {
        Path::new(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_the_usage_page_promises_are_taken() {
        for text in ["a", "0", "Qwen3-8B", "org--model_v1.5", "a.", "a-", &"x".repeat(96)] {
            assert_eq!(text.parse::<Name>().unwrap().as_str(), text);
        }
    }

    #[test]
    fn any_text_has_a_nearest_name() {
        for (text, name) in [
            ("Qwen3-8B", "Qwen3-8B"),
            ("org--model", "org--model"),
            ("my model (v2)", "my-model--v2-"),
            ("..hidden", "hidden"),
            ("-_x", "x"),
            ("a..b...c", "a.-b.-.c"),
            ("modèle", "mod-le"),
            ("模型", "model"),
            ("", "model"),
        ] {
            assert_eq!(Name::nearest(text).as_str(), name, "{text}");
            assert!(name.parse::<Name>().is_ok(), "{name}");
        }
        assert_eq!(Name::nearest(&"x".repeat(200)).as_str(), "x".repeat(96));
    }

    #[test]
    fn other_names_are_refused_with_the_rule_they_break() {
        let too_long = "x".repeat(97);
        for (text, rule) in [
            ("", "it is empty"),
            (".hidden", "it starts with '.'"),
            ("-option", "it starts with '-'"),
            ("_x", "it starts with '_'"),
            ("a..b", "it holds '..'"),
            ("a/b", "it holds '/'"),
            ("a b", "it holds ' '"),
            ("a\n", "it holds '\\n'"),
            ("modèle", "it holds 'è'"),
            (too_long.as_str(), "it has 97 characters, and 96 is the most"),
        ] {
            let error = text.parse::<Name>().unwrap_err();
            assert_eq!(error.kind(), Kind::Usage);
            assert!(error.message().ends_with(rule), "{}", error.message());
            assert!(!error.message().contains('\n'));
            assert!(error.hint_text().is_some());
        }
    }
}
