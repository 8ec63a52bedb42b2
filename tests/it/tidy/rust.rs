//! As much of Rust's grammar as the rules need: comments, strings, test code, paths and functions.

use std::collections::BTreeSet;

/// One source file, with only its code left.
pub(super) struct Source {
    /// Relative to the project's root.
    pub(super) path: String,
    /// Line for line the file's code; comments, strings and what is under `#[cfg(test)]` are blank.
    pub(super) code: String,
    /// Where it stands in the crate: `["engine", "uring"]`. Empty for the crate's root.
    module: Vec<String>,
    /// The modules below it that only tests have.
    test_modules: Vec<Vec<String>>,
}

impl Source {
    pub(super) fn new(path: &str, text: &str) -> Source {
        let inside = path.trim_start_matches("src/").trim_end_matches(".rs");
        let mut module: Vec<String> = inside.split('/').map(str::to_owned).collect();
        if module.last().is_some_and(|last| last == "mod" || last == "lib") {
            module.pop();
        }
        let (code, names) = without_tests(&blank(text));
        let below = |name: String| module.iter().cloned().chain([name]).collect();
        let test_modules = names.into_iter().map(below).collect();
        Source { path: path.to_owned(), code, module, test_modules }
    }

    pub(super) fn module(&self) -> &[String] {
        &self.module
    }
}

/// Leaves out the files that are modules of tests alone.
pub(super) fn without_test_modules(sources: Vec<Source>) -> Vec<Source> {
    let tests: Vec<Vec<String>> = sources.iter().flat_map(|source| source.test_modules.clone()).collect();
    sources.into_iter().filter(|source| !tests.iter().any(|test| source.module.starts_with(test))).collect()
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// The text with comments, strings and characters blanked; every line keeps its place and length.
pub(super) fn blank(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let Some(end) = literal_end(text, at) else {
            at += 1;
            continue;
        };
        for byte in out[at..end].iter_mut().filter(|byte| **byte != b'\n') {
            *byte = b' ';
        }
        at = end;
    }
    String::from_utf8(out).expect("whole characters were blanked")
}

/// Where the comment, string or character that begins at `at` ends; `None` where none begins.
fn literal_end(text: &str, at: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    let find = |what: &str, from: usize| text[from..].find(what).map_or(text.len(), |found| from + found);
    match bytes[at..] {
        [b'/', b'/', ..] => Some(find("\n", at)),
        [b'/', b'*', ..] => {
            let (mut depth, mut here) = (1, at + 2);
            while depth > 0 && here < bytes.len() {
                let step = match bytes[here..] {
                    [b'/', b'*', ..] => 1,
                    [b'*', b'/', ..] => -1,
                    _ => 0,
                };
                depth += step;
                here += if step == 0 { 1 } else { 2 };
            }
            Some(here)
        }
        [b'"', ..] => {
            let hashes = bytes[..at].iter().rev().take_while(|byte| **byte == b'#').count();
            let before = &bytes[..at - hashes];
            let raw = before.last() == Some(&b'r')
                && !before.iter().rev().nth(1).is_some_and(|byte| is_word(*byte) && !b"bc".contains(byte));
            if raw {
                let close = format!("\"{}", "#".repeat(hashes));
                return Some((find(&close, at + 1) + close.len()).min(text.len()));
            }
            Some(quoted_end(bytes, at, b'"'))
        }
        [b'\'', b'\\', ..] => Some(quoted_end(bytes, at, b'\'')),
        [b'\'', ..] => {
            // A character has its closing quote right behind it; a lifetime has none.
            let character = text[at + 1..].chars().next()?;
            let close = at + 1 + character.len_utf8();
            (bytes.get(close) == Some(&b'\'')).then_some(close + 1)
        }
        _ => None,
    }
}

fn quoted_end(bytes: &[u8], at: usize, quote: u8) -> usize {
    let mut here = at + 1;
    while here < bytes.len() && bytes[here] != quote {
        here += if bytes[here] == b'\\' { 2 } else { 1 };
    }
    (here + 1).min(bytes.len())
}

/// Blanks what stands under `#[cfg(test)]`, and names the modules in files of their own among it.
fn without_tests(code: &str) -> (String, Vec<String>) {
    let mut out = code.to_owned();
    let mut modules = Vec::new();
    for attribute in ["#[cfg(test)]", "#[cfg(all(test"] {
        while let Some(start) = out.find(attribute) {
            let end = item_end(out.as_bytes(), start);
            let item = &out[start..end];
            let name = item.rsplit_once("mod ").and_then(|(_, rest)| rest.strip_suffix(';'));
            modules.extend(name.map(|name| name.trim().to_owned()));
            let blanked: String = item.chars().map(|c| if c == '\n' { c } else { ' ' }).collect();
            out.replace_range(start..end, &blanked);
        }
    }
    (out, modules)
}

/// Where the item, statement, field or variant that begins with an attribute at `at` ends.
fn item_end(code: &[u8], at: usize) -> usize {
    let mut depth = 0;
    for (place, byte) in code.iter().enumerate().skip(at) {
        match byte {
            b'[' | b'(' => depth += 1,
            b']' | b')' => depth -= 1,
            b'{' if depth == 0 => return block_end(code, place),
            b';' if depth == 0 => return place + 1,
            b'}' if depth == 0 => return place,
            _ => {}
        }
    }
    code.len()
}

/// Where the block that opens at `at` ends.
fn block_end(code: &[u8], at: usize) -> usize {
    let mut depth = 0;
    for (place, byte) in code.iter().enumerate().skip(at) {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return place + 1;
        }
    }
    code.len()
}

/// The lines, from 1, on which `word` stands by itself.
pub(super) fn occurrences(code: &str, word: &str) -> Vec<usize> {
    let bytes = code.as_bytes();
    let alone = |&(at, _): &(usize, &str)| {
        let joined = at > 0 && is_word(bytes[at - 1]);
        let goes_on = |byte: &u8| is_word(*byte) && word.ends_with(|last: char| last.is_alphanumeric());
        !joined && !bytes.get(at + word.len()).is_some_and(goes_on)
    };
    let line = |(at, _)| bytes[..at].iter().filter(|byte| **byte == b'\n').count() + 1;
    code.match_indices(word).filter(alone).map(line).collect()
}

/// The paths that `code`, which stands in `module`, takes from its own crate, from the crate's root on.
pub(super) fn imports(code: &str, module: &[String]) -> BTreeSet<Vec<String>> {
    let mut paths = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        if at == 0 || (!is_word(code.as_bytes()[at - 1]) && code.as_bytes()[at - 1] != b'$') {
            use_tree(&code[at + "crate::".len()..], &mut Vec::new(), &mut paths);
        }
    }
    for (at, _) in code.match_indices("super::") {
        // Only the first `super` of a run counts.
        if at > 0 && (is_word(code.as_bytes()[at - 1]) || code.as_bytes()[at - 1] == b':') {
            continue;
        }
        let rest = code[at..].trim_start_matches("super::");
        let levels = (code.len() - at - rest.len()) / "super::".len();
        let mut prefix = module[..module.len().saturating_sub(levels)].to_vec();
        use_tree(rest, &mut prefix, &mut paths);
    }
    paths.retain(|path| !path.is_empty());
    paths
}

/// Reads one tree of a `use`, or a path in an expression, and returns what follows it.
fn use_tree<'a>(text: &'a str, prefix: &mut Vec<String>, paths: &mut BTreeSet<Vec<String>>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = rest.trim_start();
            if let Some(after) = rest.strip_prefix('}') {
                return after;
            }
            let before = rest.len();
            rest = use_tree(rest, &mut prefix.clone(), paths).trim_start();
            rest = rest.strip_prefix(',').unwrap_or(rest);
            if rest.len() == before {
                return rest;
            }
        }
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    if name.is_empty() || name == "self" {
        paths.insert(prefix.clone());
        return rest.strip_prefix('*').unwrap_or(rest);
    }
    prefix.push(name.to_owned());
    if let Some(deeper) = rest.strip_prefix("::") {
        return use_tree(deeper, prefix, paths);
    }
    paths.insert(prefix.clone());
    let renamed = rest.trim_start().strip_prefix("as ");
    renamed.map_or(rest, |alias| {
        alias.trim_start().trim_start_matches(|c: char| c.is_alphanumeric() || c == '_')
    })
}

/// Every function with a body: its name, the line it begins on, and its length in lines.
pub(super) fn function_lengths(code: &str) -> Vec<(String, usize, usize)> {
    let bytes = code.as_bytes();
    let mut functions = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let name: String = code[at + 3..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if name.is_empty() || (at > 0 && is_word(bytes[at - 1])) {
            continue;
        }
        let line = code[..at].matches('\n').count() + 1;
        let lines = code[at..item_end(bytes, at)].matches('\n').count() + 1;
        functions.push((name, line, lines));
    }
    functions
}
