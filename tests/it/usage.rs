//! What `docs/usage.md` promises is what the program has: commands, options, exit codes, JSON fields.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// The options in the first column of the tables of each command's section.
fn documented_options(usage: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut commands: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut command = None;
    for line in usage.lines() {
        if line.starts_with('#') {
            let name = line.strip_prefix("### `iloader ").and_then(|rest| rest.split([' ', '`']).next());
            command = name.map(|name| commands.entry(name.to_owned()).or_default());
        } else if let (Some(options), Some(row)) = (command.as_mut(), line.strip_prefix("| `--")) {
            let name = row.split(|c: char| !c.is_ascii_lowercase() && c != '-').next().unwrap();
            options.insert(format!("--{name}"));
        }
    }
    commands
}

/// What `iloader ARGUMENTS --help` prints.
fn help(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_iloader")).args(arguments).arg("--help").output().unwrap();
    assert!(output.status.success(), "{arguments:?} --help: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The options that a help text lists, without `--help` and `--version`.
fn listed_options(help: &str) -> BTreeSet<String> {
    let lines = help.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
    let words = lines.filter_map(|line| line.split([' ', ',', '=', '[']).find(|word| word.starts_with("--")));
    words.filter(|word| !["--help", "--version"].contains(word)).map(str::to_owned).collect()
}

/// The commands that the program's own help lists.
fn listed_commands() -> BTreeSet<String> {
    let help = help(&[]);
    let lines =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_command_and_option_is_documented_and_there() {
    let documented = documented_options(&read("docs/usage.md"));
    assert_eq!(documented.keys().cloned().collect::<BTreeSet<_>>(), listed_commands());
    for (command, options) in documented {
        assert_eq!(listed_options(&help(&[&command])), options, "iloader {command}");
    }
}

#[test]
fn every_command_has_an_example_in_its_help() {
    let commands = listed_commands();
    assert!(!commands.is_empty());
    for command in commands {
        let text = help(&[&command]);
        let example = text.split("\nExample:\n").nth(1).unwrap_or_default();
        assert!(example.contains("iloader "), "iloader {command} --help has no example");
    }
}

#[test]
fn every_exit_code_is_documented() {
    let usage = read("docs/usage.md");
    for (kind, code, _) in iloader::Kind::ALL {
        assert!(usage.contains(&format!("\n| {code} | ")), "{kind:?} has no row for {code}");
    }
}

#[test]
fn every_field_of_a_status_is_documented() {
    let messages = read("src/control/message.rs");
    let (_, status) = messages.split_once("pub struct Status {\n").unwrap();
    let (status, _) = status.split_once("\n}").unwrap();
    let fields = status.lines().filter_map(|line| line.trim_start().strip_prefix("pub ")?.split(':').next());
    let fields: Vec<&str> = fields.collect();
    assert!(fields.len() > 20, "{fields:?}");
    let usage = read("docs/usage.md");
    for field in fields {
        assert!(usage.contains(&format!("\n| `{field}` | ")), "{field} has no row");
    }
}

#[test]
fn the_built_in_exclusions_are_documented() {
    let select = read("src/source/select.rs");
    let (_, list) = select.split_once("BUILT_IN_EXCLUSIONS: &[&str] = &[").unwrap();
    let (list, _) = list.split_once("];").unwrap();
    let built_in: Vec<&str> = list.split('"').skip(1).step_by(2).collect();
    let usage = read("docs/usage.md");
    let (_, section) = usage.split_once("\n## Built-in exclusions\n").unwrap();
    let (_, section) = section.split_once("adds to it.\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let documented: Vec<&str> = section.split('`').skip(1).step_by(2).collect();
    assert_eq!(documented, built_in);
}

#[test]
fn the_tables_are_read_as_they_stand() {
    let usage = "### `iloader go NAME`\n\n| option | a |\n| `--in-place` | x |\n| `--wait[=S]` | x |\n## Rest\n| `--no` |\n";
    let documented = documented_options(usage);
    assert_eq!(documented["go"].iter().collect::<Vec<_>>(), ["--in-place", "--wait"]);
    assert_eq!(documented.len(), 1);
    let help =
        "Options:\n      --in-place       do\n      --wait[=<S>]\n  -h, --help  x\n  --base-dir <PATH>\n";
    assert_eq!(listed_options(help).iter().collect::<Vec<_>>(), ["--base-dir", "--in-place", "--wait"]);
}
