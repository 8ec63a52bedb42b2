//! What a person should know of a selection: large things that are probably not needed, and files that
//! will not work without others.
//!
//! Nothing here leaves anything out by itself: what an engine opens is its own affair. Each [`Advice`]
//! carries the flags that leave out exactly the files it counts.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;

use super::pattern::{Globs, escape, flag, literal};
use super::{Excluded, SelectedFile, Selection};
use crate::error::shown;

/// Large files that are probably not needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// What they are: "optimizer state and other leftovers of training".
    pub what: String,
    /// Bytes of memory saved by leaving them out: each distinct inode once.
    pub bytes: u64,
    /// How many files they are.
    pub files: u64,
    /// The options that leave them out: `--also-exclude 'original/'`.
    pub flags: String,
}

/// Less than this is named only where it is a share of the whole that counts.
const BYTES_MIN: u64 = 1 << 20;

/// One part in so many of the selection is worth naming, however small.
const SHARE_MIN: u64 = 100;

/// The most files that one advice names one by one, where no pattern matches just them.
const LITERALS_MAX: usize = 8;

/// Things known by where they are or how they are called.
const KNOWN: &[(&str, &[&str])] = &[
    ("the same weights in their publisher's own format", &["original/"]),
    ("the same weights for Apple's Metal", &["metal/"]),
    (
        "optimizer state and other leftovers of training",
        &[
            "checkpoint-*/",
            "global_step*/",
            "optimizer.pt",
            "optimizer.bin",
            "optimizer_*/",
            "*_optim_states.pt",
            "rng_state*.pth",
            "random_states_*.pkl",
            "scheduler.pt",
            "scheduler.bin",
            "scaler.pt",
            "training_args.bin",
            "events.out.tfevents*",
        ],
    ),
    ("an export for TensorFlow", &["*.h5", "saved_model/", "*.tflite"]),
    ("an export for Flax", &["*.msgpack"]),
    ("an export for ONNX", &["onnx/", "*.onnx", "*.onnx_data*", "*.onnx.data*"]),
    ("an export for OpenVINO", &["openvino/", "openvino_*.xml", "openvino_*.bin"]),
    ("an export for CoreML", &["coreml/", "*.mlpackage/", "*.mlmodelc/", "*.mlmodel"]),
    ("an export for Rust", &["rust_model.ot"]),
];

/// The flags for `.bin`, `.pth` and the like, the most general first: the first that match nothing else
/// are taken.
const TORCH_PATTERNS: &[&str] = &[
    "*.bin",
    "*.pth",
    "*.pt",
    "*.ckpt",
    "pytorch_model*.bin",
    "diffusion_pytorch_model*.bin",
    "adapter_model*.bin",
    "consolidated*.pth",
];

/// Large parts of the selection that are probably not needed, the largest first.
pub fn advise(selection: &Selection) -> Vec<Advice> {
    let mut desk = Desk::new(selection);
    let mut found = Vec::new();
    for (what, patterns) in KNOWN {
        let patterns = to_strings(patterns);
        let files = desk.matched_by(&patterns);
        if desk.has_weights_beside(&files) {
            found.extend(desk.advise(what, files, &patterns));
        }
    }
    let twins = desk.torch_twins();
    found.extend(desk.advise(
        "the same weights in PyTorch's format beside safetensors",
        twins,
        &to_strings(TORCH_PATTERNS),
    ));
    for (what, files, patterns) in desk.quantisations() {
        found.extend(desk.advise(&what, files, &patterns));
    }
    found.sort_by_key(|advice| std::cmp::Reverse(advice.bytes));
    found
}

fn to_strings(patterns: &[&str]) -> Vec<String> {
    patterns.iter().map(|pattern| (*pattern).to_owned()).collect()
}

/// The files of a selection while advice is looked for.
struct Desk<'a> {
    selection: &'a Selection,
    /// Indices of files that an advice has named already, or that none can: passed-through ones cost no
    /// memory, and the target of a directory link would come back under the link's name.
    settled: HashSet<usize>,
}

impl<'a> Desk<'a> {
    fn new(selection: &'a Selection) -> Desk<'a> {
        let targets: Vec<String> =
            selection.directory_links.iter().map(|link| format!("{}/", link.target)).collect();
        let fixed = |file: &SelectedFile| {
            file.passthrough || targets.iter().any(|target| file.path.starts_with(target.as_str()))
        };
        let settled = indices(&selection.files, fixed).into_iter().collect();
        Desk { selection, settled }
    }

    fn matched_by(&self, patterns: &[String]) -> Vec<usize> {
        let Some(globs) = globs(patterns) else { return Vec::new() };
        indices(&self.selection.files, |file| globs.cover(Path::new(&file.path)))
    }

    /// Weights that an engine reads are left when `files` are gone. The export is the model otherwise.
    fn has_weights_beside(&self, files: &[usize]) -> bool {
        let files: HashSet<usize> = files.iter().copied().collect();
        self.selection.files.iter().enumerate().any(|(index, file)| {
            is_weight(&file.path) && !files.contains(&index) && !self.settled.contains(&index)
        })
    }

    /// The advice to leave out `files`, by those of `patterns` that match nothing else.
    fn advise(&mut self, what: &str, files: Vec<usize>, patterns: &[String]) -> Option<Advice> {
        let all = &self.selection.files;
        let wanted: HashSet<usize> = files.into_iter().filter(|file| !self.settled.contains(file)).collect();
        if wanted.is_empty() {
            return None;
        }
        let mut covered = HashSet::new();
        let mut flags = Vec::new();
        for pattern in patterns {
            let matched = self.matched_by(std::slice::from_ref(pattern));
            if matched.iter().all(|file| wanted.contains(file))
                && matched.iter().any(|file| !covered.contains(file))
            {
                covered.extend(matched);
                flags.push(flag(pattern));
            }
        }
        let mut rest: Vec<usize> = wanted.difference(&covered).copied().collect();
        rest.sort_unstable_by_key(|file| std::cmp::Reverse(all[*file].identity.bytes));
        for file in rest.into_iter().take(LITERALS_MAX) {
            covered.insert(file);
            flags.push(flag(&literal(&all[file].path, false)));
        }
        let bytes = self.bytes_only_in(&covered);
        if bytes == 0 || (bytes < BYTES_MIN && bytes < self.selection.bytes() / SHARE_MIN) {
            return None;
        }
        let files = covered.len() as u64;
        self.settled.extend(covered);
        Some(Advice { what: what.to_owned(), bytes, files, flags: flags.join(" ") })
    }

    /// Bytes of the inodes that no other file of the selection keeps in memory. Saturates.
    fn bytes_only_in(&self, files: &HashSet<usize>) -> u64 {
        let inode = |file: &SelectedFile| (file.identity.device, file.identity.inode);
        let all = &self.selection.files;
        let others =
            all.iter().enumerate().filter(|(index, file)| !file.passthrough && !files.contains(index));
        let mut seen: HashSet<(u64, u64)> = others.map(|(_, file)| inode(file)).collect();
        files
            .iter()
            .map(|index| &all[*index])
            .filter(|file| seen.insert(inode(file)))
            .fold(0, |sum, file| sum.saturating_add(file.identity.bytes))
    }

    /// Files of PyTorch's format whose weights are in safetensors files of the same directory.
    fn torch_twins(&self) -> Vec<usize> {
        let all = &self.selection.files;
        let safetensors: HashSet<(&str, String)> = all
            .iter()
            .filter_map(|file| {
                let (directory, stem, extension) = take_apart(&file.path);
                (extension == "safetensors").then(|| (directory, weights_key(stem)))
            })
            .collect();
        indices(all, |file| {
            let (directory, stem, extension) = take_apart(&file.path);
            let has_twin = |key: &str| safetensors.contains(&(directory, key.to_owned()));
            match extension {
                "pth" if stem.starts_with("consolidated.") => has_twin("model") || has_twin("consolidated"),
                "bin" | "pth" | "pt" | "ckpt" => has_twin(&weights_key(stem)),
                _ => false,
            }
        })
    }

    /// Each quantisation of a GGUF model that is there in several: what it is, its files, its patterns.
    fn quantisations(&self) -> Vec<(String, Vec<usize>, Vec<String>)> {
        // Model → quantisation → the names without shard numbers, and the files.
        let mut models: BTreeMap<String, BTreeMap<String, Quantisation>> = BTreeMap::new();
        for (index, file) in self.selection.files.iter().enumerate() {
            let (_, stem, extension) = take_apart(&file.path);
            let stem = without_shard(stem);
            // A projector goes with any quantisation of its model.
            if extension != "gguf" || stem.starts_with("mmproj") {
                continue;
            }
            if let Some((model, quantisation)) = split_quantisation(stem) {
                let row = models.entry(model).or_default().entry(quantisation).or_default();
                row.stems.insert(escape(stem));
                row.files.push(index);
            }
        }
        let several = models.into_values().filter(|quantisations| quantisations.len() > 1);
        let advice = several.flat_map(|quantisations| {
            let count = quantisations.len();
            quantisations.into_iter().map(move |(name, Quantisation { stems, files })| {
                let patterns = stems
                    .iter()
                    .flat_map(|stem| [format!("{stem}.gguf"), format!("{stem}-*-of-*.gguf")])
                    .collect();
                (format!("GGUF quantisation {name}, one of {count}: an engine loads one"), files, patterns)
            })
        });
        advice.collect()
    }
}

/// One quantisation of a model.
#[derive(Default)]
struct Quantisation {
    /// Names of its files without shard numbers, as globs.
    stems: BTreeSet<String>,
    /// Indices of its files.
    files: Vec<usize>,
}

fn indices(files: &[SelectedFile], mut wanted: impl FnMut(&SelectedFile) -> bool) -> Vec<usize> {
    files.iter().enumerate().filter(|(_, file)| wanted(file)).map(|(index, _)| index).collect()
}

fn globs(patterns: &[String]) -> Option<Globs> {
    // Names of files become patterns here; one that is none is matched by its own path instead.
    Globs::leaving_out(patterns.iter().map(|pattern| ("--also-exclude", pattern.as_str()))).ok()
}

/// Directory, name without the extension, extension.
fn take_apart(path: &str) -> (&str, &str, &str) {
    let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
    let (stem, extension) = name.rsplit_once('.').unwrap_or((name, ""));
    (directory, stem, extension)
}

fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// `model-00001-of-00003` → `model`.
fn without_shard(stem: &str) -> &str {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    stem.rsplit_once("-of-")
        .filter(|(_, total)| is_number(total))
        .and_then(|(rest, _)| rest.rsplit_once('-'))
        .filter(|(_, number)| is_number(number))
        .map_or(stem, |(rest, _)| rest)
}

/// What two files of the same weights have in common: the name without shard numbers, in the spelling
/// of safetensors files.
fn weights_key(stem: &str) -> String {
    let stem = without_shard(stem);
    match stem.strip_prefix("pytorch_model") {
        Some(rest) => format!("model{rest}"),
        None if stem.starts_with("consolidated") => "consolidated".to_owned(),
        None => stem.to_owned(),
    }
}

/// `Llama-3-8B-Q4_K_M` → (`Llama-3-8B`, `Q4_K_M`).
fn split_quantisation(stem: &str) -> Option<(String, String)> {
    let is_separator = |byte: u8| matches!(byte, b'-' | b'.' | b'_');
    let bytes = stem.as_bytes();
    let starts = (0..bytes.len()).rev().filter(|at| *at == 0 || is_separator(bytes[at - 1]));
    for at in starts.filter(|at| stem.is_char_boundary(*at)) {
        let rest = &stem[at..];
        let tag = rest.split(['-', '.']).next().unwrap_or(rest);
        if is_quantisation(tag) {
            let model = stem[..at].trim_end_matches(['-', '.', '_']);
            // Unsloth's dynamic quantisations carry a mark of their own.
            let (model, mark) = model.strip_suffix("-UD").map_or((model, ""), |plain| (plain, "UD-"));
            return Some((model.to_owned(), format!("{mark}{tag}")));
        }
    }
    None
}

fn is_quantisation(tag: &str) -> bool {
    let tag = tag.to_ascii_uppercase();
    let plain = ["F16", "FP16", "BF16", "F32", "FP32", "MXFP4", "NVFP4"];
    let digits = tag.strip_prefix("IQ").or(tag.strip_prefix("TQ")).or(tag.strip_prefix('Q'));
    plain.iter().any(|name| tag == *name || tag.starts_with(&format!("{name}_")))
        || digits.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
}

/// A file of weights that an engine needs a configuration for, or that brings its own (GGUF).
fn is_weight(path: &str) -> bool {
    take_apart(path).2 == "gguf" || needs_config(path)
}

fn needs_config(path: &str) -> bool {
    let (_, stem, extension) = take_apart(path);
    let torch = ["pytorch_model", "diffusion_pytorch_model", "adapter_model", "model", "consolidated"];
    match extension {
        "safetensors" | "ckpt" => true,
        "bin" | "pt" | "pth" => torch.iter().any(|prefix| stem.starts_with(prefix)),
        _ => false,
    }
}

fn is_config(path: &str) -> bool {
    const NAMES: [&str; 8] = [
        "config.json",
        "params.json",
        "model_index.json",
        "adapter_config.json",
        "configuration.json",
        "config.yaml",
        "config.yml",
        "open_clip_config.json",
    ];
    NAMES.contains(&name_of(path))
}

fn is_tokenizer(path: &str) -> bool {
    const NAMES: [&str; 5] = ["vocab.json", "vocab.txt", "merges.txt", "vocab.bpe", "tekken.json"];
    let name = name_of(path);
    let extension = take_apart(path).2;
    NAMES.contains(&name)
        || name.starts_with("tokenizer")
        || matches!(extension, "model" | "tiktoken" | "spm")
}

/// A model of a kind that has no tokenizer, or takes that of another model: parts of diffusion
/// pipelines, adapters, models of images and sound.
fn may_lack_tokenizer(path: &str) -> bool {
    let name = name_of(path);
    name.starts_with("diffusion_pytorch_model")
        || ["model_index.json", "adapter_config.json", "preprocessor_config.json"].contains(&name)
}

/// Warnings for files that will not work without others, or not through the links of a view.
pub fn warnings(selection: &Selection) -> Vec<String> {
    let files = &selection.files;
    let mut found = Vec::new();
    if files.iter().all(|file| file.passthrough) {
        found.push("every selected file is passed through: nothing is held in memory".to_owned());
    }
    if files.iter().any(|file| needs_config(&file.path)) {
        let excuse = files.iter().any(|file| may_lack_tokenizer(&file.path));
        found.extend(missing(selection, "a configuration (config.json)", is_config, false));
        found.extend(missing(selection, "a tokenizer", is_tokenizer, excuse));
    }
    found.extend(onnx_external_data(files));
    found
}

/// The warning that no selected file is a `companion`, unless the source has none and an `excuse`.
fn missing(selection: &Selection, what: &str, companion: fn(&str) -> bool, excuse: bool) -> Option<String> {
    if selection.files.iter().any(|file| companion(&file.path)) {
        return None;
    }
    let left_out: Option<&Excluded> = selection.excluded.iter().find(|entry| companion(&entry.path));
    match left_out {
        Some(entry) => {
            let by = entry.pattern.as_deref().map_or("no --pattern selects it".to_owned(), |pattern| {
                format!("{} leaves it out", shown(pattern))
            });
            Some(format!("weights are selected without {what}: {} is there, but {by}", shown(&entry.path)))
        }
        None if excuse => None,
        None => Some(format!("weights are selected without {what}: there is none in the source")),
    }
}

/// ONNX Runtime and `onnx.load` resolve links before they look for the tensors beside a model.
fn onnx_external_data(files: &[SelectedFile]) -> Option<String> {
    let loaded = files.iter().filter(|file| !file.passthrough);
    let directories: HashSet<&str> = loaded
        .clone()
        .filter(|file| take_apart(&file.path).2 == "onnx")
        .map(|file| take_apart(&file.path).0)
        .collect();
    let is_data = |file: &&SelectedFile| {
        let (directory, _, extension) = take_apart(&file.path);
        let data = extension.starts_with("onnx_data") || extension == "data" || extension == "pb";
        data && directories.contains(directory)
    };
    let data = loaded.clone().find(is_data)?;
    Some(format!(
        "{} holds tensors of an ONNX model: ONNX Runtime 1.24 and later and onnx.load do not find it through \
         the links of a view; leave the model on disk with --passthrough '*.onnx*'",
        shown(&data.path)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::SelectionRules;
    use crate::source::select;
    use std::fs;

    /// A model directory of sparse files, each given with its length in KiB.
    fn model(files: &[(&str, u64)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, kibibytes) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::File::create(path).unwrap().set_len(kibibytes << 10).unwrap();
        }
        root
    }

    fn rows(files: &[(&str, u64)]) -> Vec<(u64, u64, String)> {
        let root = model(files);
        let advice = advise(&select(root.path(), &SelectionRules::default()).unwrap());
        let rows = advice.into_iter().map(|row| (row.bytes >> 10, row.files, row.flags)).collect();
        check_flags(root.path());
        rows
    }

    /// The flags of each advice leave out as many files and bytes as it says.
    fn check_flags(root: &Path) {
        let before = select(root, &SelectionRules::default()).unwrap();
        for advice in advise(&before) {
            let quoted = advice.flags.split("--also-exclude '").skip(1);
            let patterns = quoted.map(|text| text.trim_end().trim_end_matches('\'').replace("'\\''", "'"));
            let rules = SelectionRules { also_exclude: patterns.collect(), ..SelectionRules::default() };
            let after = select(root, &rules).unwrap();
            assert_eq!(before.files.len() - after.files.len(), advice.files as usize, "{advice:?}");
            assert_eq!(before.bytes() - after.bytes(), advice.bytes, "{advice:?}");
        }
    }

    #[test]
    fn the_publishers_format_and_metal_are_named() {
        let found = rows(&[
            ("config.json", 1),
            ("model-00001-of-00002.safetensors", 4000),
            ("model-00002-of-00002.safetensors", 4000),
            ("original/consolidated.00.pth", 8000),
            ("original/params.json", 1),
            ("metal/model.bin", 7000),
        ]);
        assert_eq!(
            found,
            [
                (8001, 2, "--also-exclude 'original/'".to_owned()),
                (7000, 1, "--also-exclude 'metal/'".to_owned())
            ]
        );
    }

    #[test]
    fn a_model_that_is_only_in_original_is_needed() {
        assert_eq!(rows(&[("original/consolidated.00.pth", 8000), ("original/params.json", 1)]), []);
        assert_eq!(rows(&[("onnx/model.onnx", 8000), ("config.json", 1)]), []);
        assert_eq!(
            rows(&[("checkpoint-1/model.safetensors", 8000), ("checkpoint-2/model.safetensors", 1)]),
            []
        );
    }

    #[test]
    fn torch_files_beside_safetensors_are_named() {
        let found = rows(&[
            ("model.safetensors", 4000),
            ("pytorch_model-00001-of-00002.bin", 3000),
            ("pytorch_model-00002-of-00002.bin", 1000),
            ("needed.bin", 10),
        ]);
        assert_eq!(found, [(4000, 2, "--also-exclude 'pytorch_model*.bin'".to_owned())]);
        let found = rows(&[
            ("unet/diffusion_pytorch_model.safetensors", 40),
            ("unet/diffusion_pytorch_model.bin", 40),
        ]);
        assert_eq!(found, [(40, 1, "--also-exclude '*.bin'".to_owned())]);
        // Another precision, another directory, or no safetensors: not the same weights.
        assert_eq!(rows(&[("m/model.fp16.safetensors", 40), ("m/pytorch_model.bin", 40)]), []);
        assert_eq!(rows(&[("a/model.safetensors", 40), ("b/pytorch_model.bin", 40)]), []);
        assert_eq!(rows(&[("pytorch_model.bin", 40)]), []);
    }

    #[test]
    fn exports_and_leftovers_are_named() {
        let found = rows(&[
            ("model.safetensors", 1000),
            ("tf_model.h5", 900),
            ("flax_model.msgpack", 800),
            ("onnx/model.onnx", 700),
            ("onnx/config.json", 1),
            ("openvino/openvino_model.bin", 600),
            ("coreml/x/model.mlmodel", 500),
            ("optimizer.pt", 400),
            ("checkpoint-500/optimizer.pt", 300),
            ("training_args.bin", 5),
        ]);
        let flags: Vec<&str> = found.iter().map(|row| row.2.as_str()).collect();
        assert_eq!(
            flags,
            [
                "--also-exclude '*.h5'",
                "--also-exclude '*.msgpack'",
                "--also-exclude 'checkpoint-*/' --also-exclude 'optimizer.pt' --also-exclude 'training_args.bin'",
                "--also-exclude 'onnx/'",
                "--also-exclude 'openvino/'",
                "--also-exclude 'coreml/'",
            ]
        );
    }

    #[test]
    fn small_things_are_not_named() {
        assert_eq!(rows(&[("model.safetensors", 900_000), ("training_args.bin", 5)]), []);
    }

    #[test]
    fn each_of_several_gguf_quantisations_is_named() {
        let found = rows(&[
            ("Q8/m-Q8_0-00001-of-00002.gguf", 80),
            ("Q8/m-Q8_0-00002-of-00002.gguf", 8),
            ("m-Q4_K_M.gguf", 40),
            ("m-Q4_K.gguf", 39),
            ("m-UD-Q4_K.gguf", 38),
            ("mmproj-F16.gguf", 30),
        ]);
        let expected = [
            (88, 2, "--also-exclude 'm-Q8_0-*-of-*.gguf'"),
            (40, 1, "--also-exclude 'm-Q4_K_M.gguf'"),
            (39, 1, "--also-exclude 'm-Q4_K.gguf'"),
            (38, 1, "--also-exclude 'm-UD-Q4_K.gguf'"),
        ];
        assert_eq!(found, expected.map(|row| (row.0, row.1, row.2.to_owned())));
        assert_eq!(rows(&[("Qwen3-8B-Q8_0.gguf", 80), ("Qwen3-0.6B-Q8_0.gguf", 80)]), []);
    }

    #[test]
    fn quantisations_are_read_from_names() {
        for (stem, model, tag) in [
            ("Llama-3-8B-Instruct-Q4_K_M", "Llama-3-8B-Instruct", "Q4_K_M"),
            ("llama.Q8_0", "llama", "Q8_0"),
            ("model_q4_k_m", "model", "q4_k_m"),
            ("Qwen3-8B-IQ3_XXS", "Qwen3-8B", "IQ3_XXS"),
            ("gpt-oss-mxfp4", "gpt-oss", "mxfp4"),
            ("模型-bf16", "模型", "bf16"),
        ] {
            assert_eq!(split_quantisation(stem), Some((model.to_owned(), tag.to_owned())), "{stem}");
        }
        assert_eq!(split_quantisation("Qwen3-8B"), None);
    }

    #[test]
    fn names_are_escaped_in_flags() {
        rows(&[("it's [1].safetensors", 10), ("it's [1].bin", 10), ("x.bin", 10)]);
        assert_eq!(flag(&literal("it's [1].bin", false)), r"--also-exclude './it'\''s [[]1[]].bin'");
    }

    #[test]
    fn shared_inodes_save_nothing() {
        let root = model(&[("model.safetensors", 100), ("config.json", 1)]);
        fs::create_dir(root.path().join("original")).unwrap();
        fs::hard_link(root.path().join("model.safetensors"), root.path().join("original/x.pth")).unwrap();
        assert_eq!(advise(&select(root.path(), &SelectionRules::default()).unwrap()), []);
    }

    fn warned(files: &[(&str, u64)], rules: &SelectionRules) -> Vec<String> {
        let root = model(files);
        select(root.path(), rules).unwrap().warnings
    }

    #[test]
    fn weights_without_companions_are_warned_about() {
        let default = SelectionRules::default();
        let whole = [("config.json", 1), ("tokenizer.json", 1), ("model.safetensors", 9)];
        assert_eq!(warned(&whole, &default), Vec::<String>::new());
        assert_eq!(warned(&[("m-Q4_0.gguf", 9)], &default), Vec::<String>::new());
        assert_eq!(
            warned(
                &[
                    ("model_index.json", 1),
                    ("vae/config.json", 1),
                    ("vae/diffusion_pytorch_model.safetensors", 9)
                ],
                &default
            ),
            Vec::<String>::new()
        );
        assert_eq!(
            warned(&whole, &SelectionRules { patterns: vec!["*.safetensors".into()], ..Default::default() }),
            [
                "weights are selected without a configuration (config.json): config.json is there, but no --pattern selects it",
                "weights are selected without a tokenizer: tokenizer.json is there, but no --pattern selects it",
            ]
        );
        assert_eq!(
            warned(&whole, &SelectionRules { also_exclude: vec!["tok*".into()], ..Default::default() }),
            ["weights are selected without a tokenizer: tokenizer.json is there, but tok* leaves it out"]
        );
        assert_eq!(warned(&[("model.safetensors", 9)], &default).len(), 2);
    }

    #[test]
    fn external_data_of_onnx_is_warned_about() {
        let files = [("onnx/model.onnx", 1), ("onnx/model.onnx_data", 9)];
        let found = warned(&files, &SelectionRules::default());
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("onnx/model.onnx_data holds tensors of an ONNX model"), "{found:?}");
        let rules = SelectionRules { passthrough: vec!["*.onnx*".into()], ..Default::default() };
        assert!(!warned(&files, &rules).iter().any(|text| text.contains("ONNX")));
        assert_eq!(warned(&[("model.onnx", 1)], &SelectionRules::default()), Vec::<String>::new());
    }
}
