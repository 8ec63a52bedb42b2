//! `inspect`: what a start would take, before anything is started.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;

use super::args::{self, SelectionArgs};
use super::json;
use super::output::{self, Align, Table};
use crate::budget::{self, Availability};
use crate::daemon::promise;
use crate::engine;
use crate::error::{Error, Result, shown};
use crate::failure::Failure;
use crate::hub;
use crate::memory;
use crate::plan;
use crate::source::advice::{self, Advice};
use crate::source::{self, Selection};
use crate::units::ByteSize;

/// Lines of what was left out by one exclusion; the rest is counted.
const EXCLUDED_SHOWN_MAX: usize = 5;

const HELP_AFTER: &str = "\
MODEL_DIR is a directory, or the name of a model in a local hub cache (org/name). Nothing is loaded or \
written. Whether a start would be admitted is judged with its defaults: need <= 0.90 x available memory - \
256 MiB. Sizes carry binary suffixes; with --json they are bytes.

Example:
  iloader inspect /models/Qwen3-8B --also-exclude 'original/'";

/// Show which files of a model would be loaded, and whether there is room
#[derive(Args, Clone, Debug)]
#[command(after_help = HELP_AFTER)]
pub(crate) struct InspectArgs {
    /// The model's directory
    #[arg(value_name = "MODEL_DIR")]
    model_dir: PathBuf,
    #[command(flatten)]
    selection: SelectionArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What was found out.
struct Inspection {
    selection: Selection,
    advice: Vec<Advice>,
    available: Availability,
    request: budget::Request,
    admissible_bytes: u64,
    refusal: Option<Error>,
}

/// Prints the selection and what it would take.
pub(crate) fn inspect(args: &InspectArgs) -> Result<()> {
    let model = hub::resolve(&args.model_dir)?;
    let inspection = Inspection::of(source::select(&model.root, &args.selection.rules())?)?;
    if args.json {
        return output::print_json(&inspection.document());
    }
    output::print(&inspection.text())?;
    for warning in &inspection.selection.warnings {
        output::warn(warning);
    }
    Ok(())
}

impl Inspection {
    fn of(selection: Selection) -> Result<Inspection> {
        // In this order, as at a start: what is filled in between counts twice.
        let promises = promise::standing(None);
        let available = budget::available()?.beside(&promises);
        let plan = plan::lay_out(&selection, args::CHUNK_BYTES);
        let engine = engine::Selected::probe(engine::Choice::Auto, None)?;
        let request = budget::Request {
            need_bytes: memory::need_bytes(&plan, &engine, args::WORKERS, 0),
            memory_fraction: args::MEMORY_FRACTION,
            reserve_bytes: args::RESERVE_BYTES,
            memory_bytes_max: None,
            force: false,
        };
        let refusal = budget::admit(&request, &available).err();
        let admissible_bytes = budget::admit::admissible_bytes(&request, &available)?;
        let advice = advice::advise(&selection);
        Ok(Inspection { selection, advice, available, request, admissible_bytes, refusal })
    }

    fn document(&self) -> json::InspectAnswer<'_> {
        let selection = &self.selection;
        json::InspectAnswer {
            source: selection.root.to_str().unwrap_or_default(),
            bytes: selection.bytes(),
            need_bytes: self.request.need_bytes,
            files: selection.files.iter().map(json::File::from).collect(),
            excluded: selection.excluded.iter().map(json::Excluded::from).collect(),
            memory: json::Memory {
                available_bytes: self.available.bytes,
                promised_bytes: self.available.binding.promised_bytes,
                limits: self.available.rooms.iter().map(json::Limit::from).collect(),
                admissible_bytes: self.admissible_bytes,
                admitted: self.refusal.is_none(),
                refusal: self.refusal.as_ref().map(Failure::from),
            },
            advice: self.advice.iter().map(json::Advice::from).collect(),
            warnings: &selection.warnings,
        }
    }

    fn text(&self) -> String {
        let mut text = format!("{}\n\n", shown(&self.selection.root));
        text.push_str(&self.files());
        text.push('\n');
        text.push_str(&output::fields(&self.facts()));
        for (title, lines) in [("left out", self.excluded()), ("probably not needed", self.advice_lines())] {
            if !lines.is_empty() {
                text.push_str(&format!("\n{title}:\n"));
                lines.iter().for_each(|line| text.push_str(&format!("  {}\n", output::plain(line))));
            }
        }
        text
    }

    fn files(&self) -> String {
        let mut table = Table::new(&[("SIZE", Align::Right), ("FILE", Align::Left), ("", Align::Left)]);
        for file in &self.selection.files {
            let size = ByteSize(file.identity.bytes).to_string();
            let note = if file.passthrough { "stays a link to the source" } else { "" };
            table.row([size.as_str(), file.path.as_str(), note]);
        }
        for link in &self.selection.directory_links {
            table.row(["link", link.path.as_str(), &format!("to {}", link.target)]);
        }
        table.render()
    }

    fn facts(&self) -> Vec<(String, String)> {
        let selection = &self.selection;
        let bytes = selection.bytes();
        let mut rows = vec![(
            "total".to_owned(),
            format!("{} in {} ({bytes} bytes)", ByteSize(bytes), counted(selection.files.len() as u64)),
        )];
        let need = ByteSize(self.request.need_bytes);
        rows.push(("need".to_owned(), format!("{need} in whole pages, with buffers")));
        for room in &self.available.rooms {
            let promised = match room.promised_bytes {
                0 => String::new(),
                promised => format!(", {} of it promised to starts under way", ByteSize(promised)),
            };
            rows.push((format!("room, {}", room.what), format!("{}{promised}", ByteSize(room.bytes))));
        }
        rows.extend(self.available.unread.iter().map(|unread| ("limit not read".to_owned(), unread.clone())));
        let start = match &self.refusal {
            None => format!("would be admitted (up to {})", ByteSize(self.admissible_bytes)),
            Some(error) => format!("would be refused: {}", error.message()),
        };
        rows.push(("start".to_owned(), start));
        rows
    }

    /// What was left out, by what left it out.
    fn excluded(&self) -> Vec<String> {
        let mut groups: BTreeMap<Option<&str>, Vec<&source::Excluded>> = BTreeMap::new();
        for excluded in &self.selection.excluded {
            groups.entry(excluded.pattern.as_deref()).or_default().push(excluded);
        }
        let mut lines = Vec::new();
        for (pattern, group) in groups {
            let by =
                pattern.map_or("no --pattern matches".to_owned(), |pattern| format!("by {}", shown(pattern)));
            for excluded in group.iter().take(EXCLUDED_SHOWN_MAX) {
                let size = if excluded.bytes > 0 {
                    format!(" ({})", ByteSize(excluded.bytes))
                } else {
                    String::new()
                };
                lines.push(format!("{}{size}  {by}", shown(&excluded.path)));
            }
            if group.len() > EXCLUDED_SHOWN_MAX {
                lines.push(format!("and {} more  {by}", group.len() - EXCLUDED_SHOWN_MAX));
            }
        }
        lines
    }

    fn advice_lines(&self) -> Vec<String> {
        let line = |advice: &Advice| {
            let (size, files) = (ByteSize(advice.bytes), counted(advice.files));
            format!("{size} in {files}, {}: leave out with {}", advice.what, advice.flags)
        };
        self.advice.iter().map(line).collect()
    }
}

fn counted(files: u64) -> String {
    if files == 1 { "1 file".to_owned() } else { format!("{files} files") }
}
