//! The documents: every link leads somewhere, and every command they show is one that exists.

use std::path::{Component, Path, PathBuf};

use super::{assert_tidy, project_files, read, root};

/// A text in Markdown, taken apart.
struct Markdown<'a> {
    /// The prose, line by line, with code spans left in.
    prose: Vec<&'a str>,
    /// Lines inside fences, and the contents of code spans.
    code: Vec<&'a str>,
}

impl<'a> Markdown<'a> {
    fn new(text: &'a str) -> Markdown<'a> {
        let mut markdown = Markdown { prose: Vec::new(), code: Vec::new() };
        let mut fenced = false;
        for line in text.lines() {
            if line.trim_start().starts_with("```") {
                fenced = !fenced;
            } else if fenced {
                markdown.code.push(line);
            } else {
                markdown.prose.push(line);
                markdown.code.extend(line.split('`').skip(1).step_by(2));
            }
        }
        markdown
    }

    /// The targets of all links.
    fn links(&self) -> Vec<&'a str> {
        let mut targets = Vec::new();
        for line in &self.prose {
            for (at, _) in line.match_indices("](") {
                let rest = &line[at + 2..];
                targets.extend(rest.find(')').map(|end| &rest[..end]));
            }
        }
        targets
    }

    /// The anchors that its headings make.
    fn anchors(&self) -> Vec<String> {
        let headings = self.prose.iter().filter(|line| line.starts_with('#'));
        headings.map(|line| anchor(line.trim_start_matches('#'))).collect()
    }
}

/// The anchor of a heading, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// The links in the Markdown file `path` that lead nowhere; `read` gives the text of a file if it exists.
fn broken_links(path: &str, text: &str, read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut found = Vec::new();
    for link in Markdown::new(text).links() {
        if link.contains("://") || link.starts_with("mailto:") {
            continue;
        }
        let (file, fragment) = link.split_once('#').unwrap_or((link, ""));
        let target = if file.is_empty() { path.to_owned() } else { beside(path, file) };
        let text = if file.is_empty() { Some(text.to_owned()) } else { read(&target) };
        match text {
            None => found.push(format!("{path}: {link} does not exist")),
            Some(text) if !fragment.is_empty() => {
                if !Markdown::new(&text).anchors().iter().any(|anchor| anchor == fragment) {
                    found.push(format!("{path}: {target} has no heading for #{fragment}"));
                }
            }
            Some(_) => {}
        }
    }
    found
}

/// The path of `link` in a file `path`, from the project's root on.
fn beside(path: &str, link: &str) -> String {
    let mut out = PathBuf::new();
    for part in Path::new(path).parent().unwrap_or(Path::new("")).join(link).components() {
        match part {
            Component::ParentDir => _ = out.pop(),
            part => out.push(part),
        }
    }
    out.to_str().unwrap().to_owned()
}

/// The commands that `docs/usage.md` describes, each under a heading of its own: "### `iloader start …`".
pub(crate) fn documented_commands(usage: &str) -> Vec<String> {
    let headings = usage.lines().filter_map(|line| line.strip_prefix("### `iloader "));
    headings.map(|rest| command_name(rest).to_owned()).collect()
}

fn command_name(text: &str) -> &str {
    &text[..text.find(|c: char| !c.is_ascii_lowercase() && c != '-').unwrap_or(text.len())]
}

/// The commands of the program that `text` shows and that are not among `documented`.
fn unknown_commands(path: &str, text: &str, documented: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for code in Markdown::new(text).code {
        for (at, name) in code.match_indices("iloader ") {
            let command = command_name(&code[at + name.len()..]);
            let begins = at == 0 || [' ', '(', '/', '$'].contains(&char::from(code.as_bytes()[at - 1]));
            if begins
                && !command.is_empty()
                && !command.starts_with('-')
                && !documented.contains(&command.to_owned())
            {
                found.push(format!("{path}: `iloader {command}` is not in docs/usage.md"));
            }
        }
    }
    found
}

fn documents() -> Vec<(String, String)> {
    let files = project_files().into_iter().filter(|path| path.ends_with(".md"));
    files.map(|path| (path.clone(), read(&path))).collect()
}

#[test]
fn every_link_leads_somewhere() {
    let existing = |path: &str| {
        let path = root().join(path);
        path.exists().then(|| std::fs::read_to_string(path).unwrap_or_default())
    };
    assert_tidy(documents().iter().flat_map(|(path, text)| broken_links(path, text, existing)).collect());
}

#[test]
fn every_command_shown_is_described() {
    let documented = documented_commands(&read("docs/usage.md"));
    assert!(documented.len() > 5, "{documented:?}");
    let found = documents().into_iter().flat_map(|(path, text)| unknown_commands(&path, &text, &documented));
    assert_tidy(found.collect());
}

#[test]
fn the_first_code_of_the_readme_is_the_two_commands() {
    let readme = read("README.md");
    let code = Markdown::new(&readme).code;
    let commands: Vec<&str> = code
        .iter()
        .map(|line| line.split('#').next().unwrap().trim())
        .filter(|line| !line.is_empty())
        .take(2)
        .collect();
    assert_eq!(commands, ["tools/quickstart", "cargo test"]);
    assert!(root().join("tools/quickstart").is_file());
}

#[test]
fn every_document_can_be_reached_from_the_readme() {
    let mut reached = vec!["README.md".to_owned()];
    let mut next = 0;
    while next < reached.len() {
        let path = reached[next].clone();
        next += 1;
        let text = read(&path);
        for link in Markdown::new(&text).links() {
            let target = beside(&path, link.split('#').next().unwrap());
            if target.ends_with(".md") && !reached.contains(&target) && root().join(&target).is_file() {
                reached.push(target);
            }
        }
    }
    let lost = documents().into_iter().map(|document| document.0).filter(|path| !reached.contains(path));
    assert_tidy(lost.map(|path| format!("{path}: no document leads to it")).collect());
}

#[test]
fn a_broken_link_is_found() {
    let files = |path: &str| (path == "docs/b.md").then(|| "# A `Title`, twice\n".to_owned());
    let found = |text: &str| broken_links("docs/a.md", text, files).len();
    assert_eq!(found("see [b](b.md) and [b](../docs/b.md#a-title-twice), [c](https://c.example/x)\n"), 0);
    assert_eq!(found("```\n[b](c.md)\n```\n"), 0);
    assert_eq!(found("# Here\n[h](#here)\n"), 0);
    assert_eq!(found("see [b](c.md), [b](b.md#title) and [b](#nowhere)\n"), 3);
}

#[test]
fn an_unknown_command_is_found() {
    let documented =
        documented_commands("### `iloader start MODEL_DIR --name NAME`\n### `iloader stop NAME…`\n");
    assert_eq!(documented, ["start", "stop"]);
    let found = |text: &str| unknown_commands("README.md", text, &documented).len();
    assert_eq!(
        found(
            "```\nVIEW=$(iloader start /models/a --name a)\niloader --help\n```\nRun `iloader stop a`, iloader words.\n"
        ),
        0
    );
    assert_eq!(found("```\niloader frob a\n```\nand `target/release/iloader nothing`\n"), 2);
}
