//! The project's rules as tests: who imports whom, what is allowed where, and that the documents are true.
//!
//! Each rule is a function from a text to what is wrong with it, and is tested here against texts that
//! break it, so that a rule which finds nothing is known to look.

mod docs;
mod rust;

use std::fs;
use std::path::{Path, PathBuf};

use rust::{Source, function_lengths, imports, occurrences};

/// The longest function, in lines: what fits a screen, with some room for a long `match`.
const FUNCTION_LINES_MAX: usize = 90;

/// The row of each module and what it may import, lowest row first: a module, or one part of it.
///
/// What a module imports stands above it in this list, so that nothing can import in a circle. The same
/// table, for people, is in `docs/architecture.md`.
const ROWS: &[(u32, &str, &[&str])] = &[
    (0, "error", &[]),
    (0, "failure", &["error"]),
    (0, "units", &[]),
    (0, "manifest", &["error", "units"]),
    (0, "sys", &[]),
    (1, "source", &["error", "units", "manifest", "sys"]),
    (1, "hub", &["error", "units", "manifest", "sys"]),
    (1, "registry", &["error", "failure", "units", "manifest", "sys"]),
    (1, "control", &["error", "failure", "units", "manifest", "sys"]),
    (1, "budget", &["error", "units", "manifest", "sys"]),
    (1, "gc", &["error", "units", "manifest"]),
    (1, "readers", &["error", "sys"]),
    (2, "plan", &["error", "units", "manifest", "source"]),
    (2, "tensor", &["error", "units", "manifest", "source", "plan"]),
    (3, "engine", &["error", "units", "sys"]),
    (4, "load", &["error", "units", "manifest", "sys", "source", "plan", "engine"]),
    (5, "memory", &["error", "units", "manifest", "sys", "source", "plan", "engine", "load", "budget"]),
    (
        5,
        "disk",
        &[
            "error", "units", "manifest", "sys", "source", "hub", "registry", "budget", "gc", "readers",
            "plan", "engine", "load",
        ],
    ),
    (
        6,
        "view",
        &["error", "units", "manifest", "sys", "source::DirectoryLink", "registry", "control", "memory"],
    ),
    (6, "attach", &["error", "units", "manifest", "sys", "registry", "control", "memory"]),
    (7, "daemon", ALL_LOWER),
    (7, "bench", ALL_LOWER),
    (8, "cli", ALL_LOWER),
];

/// Every module of a lower row.
const ALL_LOWER: &[&str] = &["*"];

/// Words that only some files may have.
struct Rule {
    words: &'static [&'static str],
    /// Whether the file of this path may have them.
    allowed: fn(&str) -> bool,
    why: &'static str,
}

const RULES: &[Rule] = &[
    Rule {
        words: &["unsafe"],
        allowed: |path| path.starts_with("src/sys/"),
        why: "unsafe code belongs in src/sys, behind a safe type",
    },
    Rule {
        words: &["unsafe_code"],
        allowed: |path| path.starts_with("src/sys"),
        why: "only src/sys may allow unsafe code",
    },
    Rule {
        words: &["println!", "print!", "eprintln!", "eprint!", "io::stdout", "io::stderr"],
        allowed: |path| path.starts_with("src/cli/") || path == "src/daemon/log.rs",
        why: "only the command line prints, and the daemon through its log",
    },
    Rule {
        words: &["process::exit", "process::abort"],
        allowed: |path| path.starts_with("src/cli/"),
        why: "only the command line ends the process",
    },
    Rule {
        words: &["env::args", "env::args_os", "clap"],
        allowed: |path| path.starts_with("src/cli/"),
        why: "only the command line parses arguments",
    },
    Rule {
        words: &["serde", "serde_json"],
        allowed: |path| SERDE.iter().any(|place| path.starts_with(place)),
        why: "serde is for the wire, the formats on disk and the command line's JSON",
    },
    Rule {
        words: &["std::fs", "std::io", "std::net", "rustix", "libc", "crate::sys", "File"],
        allowed: |path| !path.starts_with("src/plan/") && path != "src/gc.rs",
        why: "plan and gc decide, they do no I/O",
    },
    Rule {
        words: &["Timestamp::now", "SystemTime::now", "ClockId::Realtime"],
        allowed: |path| WALL_TIME.contains(&path),
        why: "the clock on the wall jumps: times are measured with Instant",
    },
    Rule {
        words: &["tokio", "tokio_uring"],
        allowed: |path| path == "src/engine/tokio_uring.rs",
        why: "no async runtime in the product's own paths",
    },
    Rule {
        words: &["todo!", "unimplemented!", "dbg!"],
        allowed: |_| false,
        why: "unfinished code is not committed",
    },
];

/// What notes the time of day, for people, and computes nothing with it; and what compares it with the times of files,
/// which are of the same clock.
const WALL_TIME: &[&str] = &[
    "src/daemon/log.rs",
    "src/daemon/preload.rs",
    "src/daemon/registered.rs",
    "src/disk/copy.rs",
    "src/disk/generation.rs",
];

/// Where serde may be used: see `docs/architecture.md`.
const SERDE: &[&str] = &[
    "src/failure.rs",
    "src/manifest.rs",
    "src/control/",
    "src/daemon/config.rs",
    "src/registry/record.rs",
    "src/budget/quota.rs",
    "src/tensor/",
    "src/disk/",
    "src/cli/output.rs",
    "src/cli/json.rs",
];

/// Names that say nothing about what is inside.
const EMPTY_NAMES: &[&str] = &["utils", "util", "common", "misc", "helpers", "manager"];

/// The import rules that `source` breaks.
fn forbidden_imports(source: &Source) -> Vec<String> {
    let Some(module) = source.module().first().map(String::as_str).filter(|module| *module != "main") else {
        return Vec::new();
    };
    let Some((row, _, allowed)) = ROWS.iter().find(|row| row.1 == module) else {
        return vec![format!("{}: the module {module} has no row in tests/it/tidy.rs", source.path)];
    };
    let wrong = |path: &Vec<String>| {
        // The crate's root has the names of error for short.
        let top = if ["Error", "Kind", "Result"].contains(&path[0].as_str()) { "error" } else { &path[0] };
        let lower = ROWS.iter().any(|other| other.1 == top && other.0 < *row);
        let joined = path.join("::");
        let may = |entry: &&str| {
            let part = joined.strip_prefix(*entry);
            (*entry == "*" && lower)
                || *entry == top
                || part.is_some_and(|rest| rest.starts_with("::") || rest.is_empty())
        };
        top != module && !allowed.iter().any(may)
    };
    let paths = imports(&source.code, source.module());
    let lines = paths.iter().filter(|path| wrong(path));
    lines.map(|path| format!("{}: {module} may not import {}", source.path, path.join("::"))).collect()
}

/// The words in `source` that [`RULES`] forbid there.
fn forbidden_words(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    for rule in RULES.iter().filter(|rule| !(rule.allowed)(&source.path)) {
        for word in rule.words {
            for line in occurrences(&source.code, word) {
                found.push(format!("{}:{line}: `{word}`: {}", source.path, rule.why));
            }
        }
    }
    found
}

/// The functions of `source` that do not fit a screen.
fn long_functions(source: &Source) -> Vec<String> {
    let long = function_lengths(&source.code).into_iter().filter(|function| function.2 > FUNCTION_LINES_MAX);
    long.map(|(name, line, lines)| {
        format!("{}:{line}: {name} has {lines} lines, more than {FUNCTION_LINES_MAX}", source.path)
    })
    .collect()
}

/// What is wrong with a text of any kind.
fn untidy_text(path: &str, text: &str) -> Vec<String> {
    // Put together here, so that this file does not have them.
    let unfinished = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X"), concat!("HA", "CK")];
    let mut found = Vec::new();
    for (number, line) in text.split('\n').enumerate() {
        let mut report = |what: &str| found.push(format!("{path}:{}: {what}", number + 1));
        if unfinished.iter().any(|word| !occurrences(line, word).is_empty()) {
            report("a mark of something unfinished");
        }
        if line.ends_with([' ', '\t', '\r']) {
            report("blanks at the end of the line");
        }
        if line.chars().any(|character| character.is_control() && character != '\t') {
            report("a control character");
        }
    }
    if !text.is_empty() && (!text.ends_with('\n') || text.ends_with("\n\n")) {
        found.push(format!("{path}: must end with one line break"));
    }
    let stem = Path::new(path).file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    if EMPTY_NAMES.contains(&stem) {
        found.push(format!("{path}: name the file after what is in it"));
    }
    if text.starts_with("#!/usr/bin/env bash") && !text.contains("\nset -euo pipefail\n") {
        found.push(format!("{path}: a script begins with set -euo pipefail"));
    }
    found
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file of the project, relative to its root, sorted; nothing that was built or installed.
fn project_files() -> Vec<String> {
    let mut directories: Vec<PathBuf> = ["src", "tests", "tools", "benches", "docs", "fuzz", ".ci"]
        .iter()
        .map(|name| root().join(name))
        .collect();
    let mut files: Vec<String> = [
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Cargo.toml",
        "clippy.toml",
        "rustfmt.toml",
        ".gitignore",
    ]
    .map(str::to_owned)
    .into();
    while let Some(directory) = directories.pop() {
        let Ok(entries) = fs::read_dir(&directory) else { continue };
        for entry in entries {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if [".venv", "__pycache__", "artifacts", "corpus", "target"].contains(&name) {
                continue;
            }
            if path.is_dir() {
                directories.push(path);
            } else {
                files.push(path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    files.sort();
    files
}

/// The text of a project file.
fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|cause| panic!("cannot read {path}: {cause}"))
}

/// The program's own sources, without their tests.
fn product_sources() -> Vec<Source> {
    let files = project_files();
    let rust = files.iter().filter(|path| path.starts_with("src/") && path.ends_with(".rs"));
    let sources: Vec<Source> = rust.map(|path| Source::new(path, &read(path))).collect();
    assert!(sources.len() > 15, "only {} sources were found", sources.len());
    rust::without_test_modules(sources)
}

fn assert_tidy(found: Vec<String>) {
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn lower_rows_never_import_higher_ones() {
    assert_tidy(product_sources().iter().flat_map(forbidden_imports).collect());
}

#[test]
fn words_stay_where_they_belong() {
    assert_tidy(product_sources().iter().flat_map(forbidden_words).collect());
}

#[test]
fn functions_fit_a_screen() {
    assert_tidy(product_sources().iter().flat_map(long_functions).collect());
}

#[test]
fn texts_are_tidy() {
    assert_tidy(project_files().iter().flat_map(|path| untidy_text(path, &read(path))).collect());
}

#[test]
fn scripts_can_be_executed() {
    use std::os::unix::fs::PermissionsExt;
    let mut found = Vec::new();
    for path in project_files() {
        let executable = fs::metadata(root().join(&path)).unwrap().permissions().mode() & 0o111 != 0;
        let script = read(&path).starts_with("#!/");
        if script != executable {
            found.push(format!("{path}: script {script}, executable {executable}"));
        }
    }
    assert_tidy(found);
}

#[test]
fn every_module_has_a_row_above_what_it_imports() {
    for (place, (row, module, imports)) in ROWS.iter().enumerate() {
        for import in imports.iter().filter(|import| **import != "*") {
            let top = import.split("::").next().unwrap();
            let above = ROWS[..place].iter().any(|other| other.1 == top && other.0 <= *row);
            assert!(above, "{module} imports {top}, which does not stand above it");
        }
    }
    let architecture = read("docs/architecture.md");
    for line in read("src/lib.rs").lines() {
        let Some(module) = line.strip_prefix("pub mod ").and_then(|rest| rest.strip_suffix(';')) else {
            continue;
        };
        assert!(ROWS.iter().any(|row| row.1 == module), "{module} has no row here");
        assert!(architecture.contains(&format!("`{module}`")), "docs/architecture.md does not name {module}");
    }
}

/// The tests that the table of faults in `text` names and that are nowhere, and rows that name none.
fn untested_faults(text: &str, exists: impl Fn(&str, &str) -> bool) -> Vec<String> {
    let table = text.split("\n## Faults\n").nth(1).and_then(|rest| rest.split("\n## ").next());
    let rows = table.unwrap_or_default().lines().filter(|line| line.starts_with("| ")).skip(2);
    let mut found = Vec::new();
    let mut count = 0;
    for row in rows {
        count += 1;
        let tests: Vec<&str> =
            row.trim_end_matches(" |").rsplit(" | ").next().unwrap().split("<br>").collect();
        for test in tests {
            let named = test.trim().trim_matches('`').split_once("::");
            if named.is_none_or(|(story, name)| !exists(story, name)) {
                found.push(format!("no such test: {test}, in: {row}"));
            }
        }
    }
    if count == 0 {
        found.push("there is no table of faults".to_owned());
    }
    found
}

#[test]
fn every_fault_of_the_operations_page_is_a_test() {
    let exists = |story: &str, name: &str| {
        let path = root().join("tests/it").join(format!("{story}.rs"));
        fs::read_to_string(path).is_ok_and(|text| text.contains(&format!("#[test]\nfn {name}()")))
    };
    assert_tidy(untested_faults(&read("docs/operations.md"), exists));
    let table =
        |row: &str| format!("\n## Faults\n\n| a | b | c | test |\n| --- | --- | --- | --- |\n{row}\n");
    let story = |_: &str, name: &str| name == "there";
    assert_eq!(untested_faults(&table("| x | y | z | `s::there`<br>`t::there` |"), story), [""; 0]);
    for bad in ["", "| x | y | z | `s::gone` |", "| x | y | z | `s::there`<br>`s::gone` |", "| x | y | z |"] {
        assert_eq!(untested_faults(&table(bad), story).len(), 1, "{bad}");
    }
}

#[test]
fn a_forbidden_import_is_found() {
    let found = |path: &str, text: &str| forbidden_imports(&Source::new(path, text));
    for (path, text) in [
        ("src/engine/uring.rs", "use crate::plan::Chunk;"),
        ("src/engine/uring.rs", "use crate::{error::Error, plan::Chunk};"),
        ("src/engine/uring.rs", "fn f() { crate::cli::main(); }"),
        ("src/engine/uring.rs", "use super::super::daemon::serve;"),
        ("src/engine/mod.rs", "use super::{units, load::{self, run}};"),
        ("src/sys/map.rs", "use crate::error::Error;"),
        ("src/sys/map.rs", "use crate::Error;"),
        ("src/disk/store.rs", "use crate::memory::Segment;"),
        ("src/view.rs", "use crate::daemon::Config;"),
        ("src/view.rs", "use crate::source::select;"),
        ("src/view.rs", "use crate::source::DirectoryLinks;"),
        ("src/daemon/serve.rs", "use crate::cli;"),
        ("src/daemon/serve.rs", "use crate::bench;"),
        ("src/novelty.rs", ""),
    ] {
        assert!(!found(path, text).is_empty(), "{path}: {text}");
    }
    for (path, text) in [
        (
            "src/engine/uring.rs",
            "use crate::{Error, sys::map::Window};\nuse super::Engine;\nuse crate::engine::x;",
        ),
        ("src/engine/uring.rs", "// use crate::plan\nconst A: &str = \"crate::plan::x\"; /* crate::cli */"),
        ("src/engine/uring.rs", "#[cfg(test)]\nmod tests { use crate::plan::Chunk; }"),
        ("src/engine/uring.rs", "pub(crate) fn plan() {}"),
        ("src/view/tree.rs", "use crate::source::DirectoryLink;"),
        ("src/daemon/serve.rs", "use crate::{memory, view::View, budget, registry::Lock};"),
        ("src/main.rs", "fn main() { iloader::cli::main() }"),
        ("src/lib.rs", "pub use crate::cli::x;"),
    ] {
        assert_eq!(found(path, text), [""; 0], "{path}: {text}");
    }
}

#[test]
fn a_forbidden_word_is_found() {
    let found = |path: &str, text: &str| forbidden_words(&Source::new(path, text)).len();
    for (path, text) in [
        ("src/load/mod.rs", "fn f() { unsafe { g() } }"),
        ("src/load/mod.rs", "#![allow(unsafe_code)]"),
        ("src/load/mod.rs", "fn f() { println!(\"{}\", 1) }"),
        ("src/load/mod.rs", "fn f() { let _ = std::io::stderr().write(b\"x\"); }"),
        ("src/daemon/serve.rs", "fn f() { std::process::exit(1) }"),
        ("src/daemon/serve.rs", "fn f() { std::env::args(); }"),
        ("src/source/mod.rs", "use serde::Serialize;"),
        ("src/source/mod.rs", "fn f() { todo!() }"),
        ("src/plan/mod.rs", "use std::fs;"),
        ("src/gc.rs", "fn f(a: &std::fs::Metadata) {}"),
        ("src/load/mod.rs", "use tokio::spawn;"),
        ("src/daemon/serve.rs", "fn f() { jiff::Timestamp::now(); }"),
    ] {
        assert_eq!(found(path, text), 1, "{path}: {text}");
    }
    for (path, text) in [
        ("src/sys/map.rs", "fn f() { unsafe { g() } }"),
        ("src/load/mod.rs", "/// Not unsafe, and no println!.\nfn f() -> char { '\"' } // unsafe"),
        ("src/load/mod.rs", "const A: &str = r#\"unsafe \" println!\"#;"),
        (
            "src/load/mod.rs",
            "#[cfg(test)]\nmod tests { fn f() { println!(\"\\\"\"); } }\nfn g<'a>(x: &'a str) {}",
        ),
        ("src/load/mod.rs", "fn f() { my_println!(); unsafe_name(); }"),
        ("src/cli/output.rs", "fn f() { println!(); }"),
        ("src/control/message.rs", "use serde::Serialize;"),
    ] {
        assert_eq!(found(path, text), 0, "{path}: {text}");
    }
}

#[test]
fn a_long_function_is_found() {
    let function = |lines: usize| {
        format!(
            "fn short() {{}}\nimpl A {{\n    fn long(a: [u8; 2]) {{\n{}    }}\n}}\n",
            "        a();\n".repeat(lines)
        )
    };
    let found = |lines| long_functions(&Source::new("src/a.rs", &function(lines)));
    assert_eq!(found(FUNCTION_LINES_MAX - 2), [""; 0]);
    assert_eq!(found(FUNCTION_LINES_MAX - 1), ["src/a.rs:3: long has 91 lines, more than 90"]);
}

#[test]
fn an_untidy_text_is_found() {
    let marked = format!("// {}: later\n", concat!("TO", "DO"));
    for (path, text) in [
        ("src/a.rs", marked.as_str()),
        ("src/a.rs", "let a = 1; \n"),
        ("src/a.rs", "a\r\n"),
        ("docs/a.md", "no line break"),
        ("docs/a.md", "two line breaks\n\n"),
        ("src/utils.rs", "fn f() {}\n"),
        ("tools/a", "#!/usr/bin/env bash\ntrue\n"),
    ] {
        assert!(!untidy_text(path, text).is_empty(), "{path}: {text:?}");
    }
    assert_eq!(untidy_text("tools/a", "#!/usr/bin/env bash\nset -euo pipefail\n"), [""; 0]);
}
