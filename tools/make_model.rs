//! Makes a checkpoint that looks like a real one, from a seed: for tests, benchmarks and a first try.
//!
//! The layout is that of a Qwen or Llama model: `config.json`, a byte-level BPE tokenizer, and safetensors
//! shards with their index. Weights are BF16, norms F32, all of them finite. A tensor's bytes depend on
//! the seed and its name alone, so the same model can be cut into any number of shards.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use iloader::error::shown;
use iloader::units::ByteSize;
use iloader::{Error, Kind, Result};
use serde_json::{Map, Value, json};

/// What is written at a time: large enough for the device, small enough for the CPU's cache.
const BUFFER_BYTES: usize = 1 << 20;

/// The length of each of the `--small-files`.
const SMALL_FILE_BYTES: usize = 1024;

/// How many of the small files share a directory.
const SMALL_FILES_PER_DIRECTORY: usize = 1000;

/// The rows of the smallest embedding: a little more than the tokenizer has tokens.
const VOCABULARY_MIN: u64 = 1024;

/// A model to make.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    /// The bytes of all tensors: met to within one row of the embedding, and never exceeded.
    pub(crate) size: ByteSize,
    /// How many safetensors files they are cut into.
    pub(crate) shards: usize,
    /// The same seed and sizes make the same bytes.
    pub(crate) seed: u64,
    /// Leave the tensors as holes: a huge model that takes no disk and reads as zeros.
    pub(crate) sparse: bool,
    /// Further files of 1 KiB each, below `small/`.
    pub(crate) small_files: usize,
    /// Write into a directory that is not empty, and replace the model in it.
    pub(crate) force: bool,
    /// Flush the shards and drop them from the page cache, so that the next read is from the device.
    pub(crate) cold: bool,
}

impl Default for Recipe {
    fn default() -> Recipe {
        Recipe {
            size: ByteSize(1 << 30),
            shards: 2,
            seed: 0,
            sparse: false,
            small_files: 0,
            force: false,
            cold: false,
        }
    }
}

/// What was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Made {
    /// Bytes of all tensors.
    pub(crate) bytes: u64,
    /// Number of tensors.
    pub(crate) tensors: usize,
}

impl Recipe {
    /// Writes the model into `directory`, which is created if need be.
    ///
    /// # Errors
    /// Where the directory is not empty (without `force`), where the size is too small for a model or for
    /// that many shards, and where writing fails; what was written until then stays.
    pub(crate) fn write(&self, directory: &Path) -> Result<Made> {
        let shape = Shape::fit(self.size)?;
        let shards = cut(shape.tensors(), self.shards)?;
        self.prepare(directory)?;
        write_json(&directory.join("config.json"), &shape.config())?;
        write_tokenizer(directory)?;
        write_json(&directory.join("model.safetensors.index.json"), &index(&shards))?;
        self.write_shards(directory, &shards)?;
        self.write_small_files(directory)?;
        let tensors = shards.iter().flatten();
        Ok(Made { bytes: tensors.clone().map(Tensor::bytes).sum(), tensors: tensors.count() })
    }

    /// Makes sure that what stands in `directory` afterwards is this model and not a mix of two.
    fn prepare(&self, directory: &Path) -> Result<()> {
        fs::create_dir_all(directory).map_err(|cause| Error::io("create", directory, &cause))?;
        let entries = fs::read_dir(directory).map_err(|cause| Error::io("list", directory, &cause))?;
        for entry in entries {
            let path = entry.map_err(|cause| Error::io("list", directory, &cause))?.path();
            if !self.force {
                let message = format!("{} is not empty", shown(directory));
                return Err(Error::new(Kind::InUse, message).hint("name a new directory, or give --force"));
            }
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.starts_with("model-") && name.ends_with(".safetensors") {
                fs::remove_file(&path).map_err(|cause| Error::io("remove", &path, &cause))?;
            }
        }
        Ok(())
    }

    /// Writes all shards, as many at once as there are processors.
    fn write_shards(&self, directory: &Path, shards: &[Vec<Tensor>]) -> Result<()> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(shards.len());
        let next = AtomicUsize::new(0);
        let work = || -> Result<()> {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(tensors) = shards.get(number) else { return Ok(()) };
                let path = directory.join(shard_name(number, shards.len()));
                self.write_shard(&path, tensors).map_err(|cause| Error::io("write", &path, &cause))?;
            }
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            workers.into_iter().try_for_each(|worker| {
                worker.join().unwrap_or_else(|_| Err(Error::new(Kind::Failed, "a writer panicked")))
            })
        })
    }

    fn write_shard(&self, path: &Path, tensors: &[Tensor]) -> std::io::Result<()> {
        let mut file = File::create(path)?;
        let header = header(tensors);
        file.write_all(&header)?;
        if self.sparse {
            let bytes: u64 = tensors.iter().map(Tensor::bytes).sum();
            file.set_len(header.len() as u64 + bytes)?;
        } else {
            let mut buffer = vec![0; BUFFER_BYTES];
            for tensor in tensors {
                tensor.write(self.seed, &mut file, &mut buffer)?;
            }
        }
        if self.cold {
            file.sync_data()?;
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
        }
        Ok(())
    }

    fn write_small_files(&self, directory: &Path) -> Result<()> {
        let mut buffer = [0; SMALL_FILE_BYTES];
        for number in 0..self.small_files {
            let parent = directory.join(format!("small/{:03}", number / SMALL_FILES_PER_DIRECTORY));
            if number % SMALL_FILES_PER_DIRECTORY == 0 {
                fs::create_dir_all(&parent).map_err(|cause| Error::io("create", &parent, &cause))?;
            }
            let path = parent.join(format!("{number:06}.bin"));
            let mut stream = Stream::new(self.seed, &format!("small/{number}"));
            stream.fill(&mut buffer, |random| random);
            fs::write(&path, buffer).map_err(|cause| Error::io("write", &path, &cause))?;
        }
        Ok(())
    }
}

/// The dimensions of a model, as its `config.json` has them.
#[derive(Clone, Copy, Debug)]
struct Shape {
    hidden: u64,
    layers: u64,
    vocabulary: u64,
}

impl Shape {
    /// The shape whose tensors fill `size` best: a width that goes with the size, then as many layers as
    /// fit beside an embedding, then more rows in the embedding.
    fn fit(size: ByteSize) -> Result<Shape> {
        const WIDTHS: [(u64, u64); 7] = [
            (64 << 30, 8192),
            (8 << 30, 4096),
            (1 << 30, 2048),
            (128 << 20, 1024),
            (16 << 20, 256),
            (1 << 20, 64),
            (0, 16),
        ];
        let hidden = WIDTHS.iter().find(|row| size.0 >= row.0).map_or(16, |row| row.1);
        let mut shape = Shape { hidden, layers: 0, vocabulary: VOCABULARY_MIN };
        let fixed = shape.bytes();
        let layer = Shape { layers: 1, ..shape }.bytes() - fixed;
        // An eighth of the bytes goes into the two embeddings, as in models of this kind.
        shape.layers = (size.0.saturating_sub(fixed.max(size.0 / 8)) / layer).max(1);
        let rest = size.0.checked_sub(shape.bytes()).ok_or_else(|| {
            let least = ByteSize(fixed + layer);
            Error::new(Kind::Usage, format!("a model of {size} is too small: the least is {least}"))
        })?;
        shape.vocabulary += rest / (2 * 2 * hidden);
        Ok(shape)
    }

    fn bytes(&self) -> u64 {
        // Layers are all alike, so one of them stands for any number: the sum of a huge model is quick.
        let few = Shape { layers: self.layers.min(1), ..*self };
        let sum = |shape: &Shape| shape.tensors().iter().map(Tensor::bytes).sum::<u64>();
        let layer = if self.layers > 1 { sum(&few) - sum(&Shape { layers: 0, ..few }) } else { 0 };
        sum(&few) + layer * self.layers.saturating_sub(1)
    }

    fn head(&self) -> u64 {
        (self.hidden / 8).clamp(2, 128)
    }

    fn intermediate(&self) -> u64 {
        self.hidden * 3
    }

    /// The tensors in the order in which checkpoints of this layout have them.
    fn tensors(&self) -> Vec<Tensor> {
        let (hidden, head, intermediate) = (self.hidden, self.head(), self.intermediate());
        let key_value = hidden / 4;
        let mut tensors = vec![Tensor::weight("model.embed_tokens", [self.vocabulary, hidden])];
        for layer in 0..self.layers {
            let weight = |name: &str, shape| Tensor::weight(&format!("model.layers.{layer}.{name}"), shape);
            let norm = |name: &str, width| Tensor::norm(&format!("model.layers.{layer}.{name}"), width);
            tensors.extend([
                norm("input_layernorm", hidden),
                weight("self_attn.q_proj", [hidden, hidden]),
                weight("self_attn.k_proj", [key_value, hidden]),
                weight("self_attn.v_proj", [key_value, hidden]),
                weight("self_attn.o_proj", [hidden, hidden]),
                norm("self_attn.q_norm", head),
                norm("self_attn.k_norm", head),
                norm("post_attention_layernorm", hidden),
                weight("mlp.gate_proj", [intermediate, hidden]),
                weight("mlp.up_proj", [intermediate, hidden]),
                weight("mlp.down_proj", [hidden, intermediate]),
            ]);
        }
        tensors.push(Tensor::norm("model.norm", hidden));
        tensors.push(Tensor::weight("lm_head", [self.vocabulary, hidden]));
        tensors
    }

    fn config(&self) -> Value {
        json!({
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "head_dim": self.head(),
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate(),
            "max_position_embeddings": 32768,
            "model_type": "qwen3",
            "num_attention_heads": self.hidden / self.head(),
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.hidden / self.head() / 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000,
            "tie_word_embeddings": false,
            "torch_dtype": "bfloat16",
            "use_cache": true,
            "vocab_size": self.vocabulary,
        })
    }
}

/// How the numbers of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dtype {
    Bf16,
    F32,
}

/// One tensor of the model.
#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
}

impl Tensor {
    fn weight(name: &str, shape: [u64; 2]) -> Tensor {
        Tensor { name: format!("{name}.weight"), dtype: Dtype::Bf16, shape: shape.into() }
    }

    fn norm(name: &str, width: u64) -> Tensor {
        Tensor { name: format!("{name}.weight"), dtype: Dtype::F32, shape: vec![width] }
    }

    fn bytes(&self) -> u64 {
        let element = if self.dtype == Dtype::Bf16 { 2 } else { 4 };
        self.shape.iter().product::<u64>() * element
    }

    /// Writes the tensor's numbers. Exponents are fixed but for three bits, so that no pattern is NaN or
    /// infinite and the sizes are those of weights: 2^-15 to 2^-7, with either sign; norms are 1 to 2.
    fn write(&self, seed: u64, file: &mut File, buffer: &mut [u8]) -> std::io::Result<()> {
        let mut stream = Stream::new(seed, &self.name);
        let mut left = self.bytes();
        while left > 0 {
            let part = &mut buffer[..left.min(BUFFER_BYTES as u64) as usize];
            match self.dtype {
                Dtype::Bf16 => {
                    stream.fill(part, |random| (random & 0x83ff_83ff_83ff_83ff) | 0x3800_3800_3800_3800);
                }
                Dtype::F32 => {
                    stream.fill(part, |random| (random & 0x007f_ffff_007f_ffff) | 0x3f80_0000_3f80_0000)
                }
            }
            file.write_all(part)?;
            left -= part.len() as u64;
        }
        Ok(())
    }
}

/// SplitMix64 from a seed and a name: each value is a function of its place, which compilers vectorise.
struct Stream {
    state: u64,
}

impl Stream {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    fn new(seed: u64, name: &str) -> Stream {
        // FNV-1a of the name, so that tensors differ from each other.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Stream { state: mix(seed.wrapping_mul(Stream::STEP) ^ hash) }
    }

    /// Fills `buffer` with what `shape` makes of the random words, in little-endian order.
    fn fill(&mut self, buffer: &mut [u8], shape: impl Fn(u64) -> u64) {
        let (words, tail) = buffer.as_chunks_mut::<8>();
        for word in words {
            self.state = self.state.wrapping_add(Stream::STEP);
            *word = shape(mix(self.state)).to_le_bytes();
        }
        if !tail.is_empty() {
            self.state = self.state.wrapping_add(Stream::STEP);
            let last = shape(mix(self.state)).to_le_bytes();
            tail.copy_from_slice(&last[..tail.len()]);
        }
    }
}

fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Cuts the tensors into `shards` runs of about the same number of bytes, none of them empty.
fn cut(tensors: Vec<Tensor>, shards: usize) -> Result<Vec<Vec<Tensor>>> {
    if shards == 0 || shards > tensors.len() {
        let message = format!("{} tensors cannot be cut into {shards} shards", tensors.len());
        return Err(Error::new(Kind::Usage, message).hint(format!("give --shards 1 to {}", tensors.len())));
    }
    let total: u128 = tensors.iter().map(|tensor| u128::from(tensor.bytes())).sum();
    let mut runs: Vec<Vec<Tensor>> = vec![Vec::new()];
    let (mut before, mut left) = (0_u128, tensors.len());
    for tensor in tensors {
        let bytes = u128::from(tensor.bytes());
        let (done, last) = (runs.len(), runs.len() - 1);
        // The next run begins where the middle of this tensor lies behind the boundary, and at the latest
        // where each run still to come can have only one tensor.
        let behind = (before + bytes / 2) * shards as u128 >= total * done as u128;
        let must = left <= shards - done;
        if done < shards && !runs[last].is_empty() && (behind || must) {
            runs.push(vec![tensor]);
        } else {
            runs[last].push(tensor);
        }
        before += bytes;
        left -= 1;
    }
    Ok(runs)
}

fn shard_name(number: usize, of: usize) -> String {
    format!("model-{:05}-of-{of:05}.safetensors", number + 1)
}

/// A safetensors header: its length in 8 bytes, then JSON, padded with blanks to a multiple of 8.
fn header(tensors: &[Tensor]) -> Vec<u8> {
    let mut entries = Map::new();
    entries.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.bytes();
        let dtype = if tensor.dtype == Dtype::Bf16 { "BF16" } else { "F32" };
        let entry = json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": [start, end] });
        entries.insert(tensor.name.clone(), entry);
        start = end;
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// The index: which shard has which tensor.
fn index(shards: &[Vec<Tensor>]) -> Value {
    let mut places = Map::new();
    for (number, tensors) in shards.iter().enumerate() {
        for tensor in tensors {
            places.insert(tensor.name.clone(), shard_name(number, shards.len()).into());
        }
    }
    let bytes: u64 = shards.iter().flatten().map(Tensor::bytes).sum();
    json!({ "metadata": { "total_size": bytes }, "weight_map": places })
}

/// The special tokens and their numbers, behind the 256 bytes and the 676 merged pairs of letters.
const SPECIAL_TOKENS: [(&str, u64); 3] = [("<|endoftext|>", 932), ("<|im_start|>", BOS), ("<|im_end|>", EOS)];
const BOS: u64 = 933;
const EOS: u64 = 934;

/// Writes a byte-level BPE tokenizer that engines accept: every byte is a token, and so is every pair of
/// small letters.
fn write_tokenizer(directory: &Path) -> Result<()> {
    let mut vocabulary = Map::new();
    for (number, character) in byte_characters().enumerate() {
        vocabulary.insert(character.to_string(), number.into());
    }
    let mut merges = Vec::new();
    for first in 'a'..='z' {
        for second in 'a'..='z' {
            vocabulary.insert(format!("{first}{second}"), vocabulary.len().into());
            merges.push(json!([first.to_string(), second.to_string()]));
        }
    }
    let special = |token: &str| json!({ "content": token, "lstrip": false, "normalized": false, "rstrip": false, "single_word": false, "special": true });
    let mut added = Vec::new();
    let mut decoder = Map::new();
    for (token, number) in SPECIAL_TOKENS {
        let mut entry = special(token);
        decoder.insert(number.to_string(), entry.clone());
        entry["id"] = number.into();
        added.push(entry);
    }
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true });
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "vocab": vocabulary,
            "merges": merges,
        },
    });
    write_json(&directory.join("tokenizer.json"), &tokenizer)?;
    let tokens = json!({ "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>" });
    write_json(&directory.join("special_tokens_map.json"), &tokens)?;
    let config = json!({
        "add_bos_token": false,
        "added_tokens_decoder": decoder,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": false,
        "eos_token": "<|im_end|>",
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    });
    write_json(&directory.join("tokenizer_config.json"), &config)?;
    let generation = json!({
        "bos_token_id": BOS,
        "do_sample": true,
        "eos_token_id": [EOS, SPECIAL_TOKENS[0].1],
        "pad_token_id": SPECIAL_TOKENS[0].1,
        "temperature": 0.7,
        "top_p": 0.8,
    });
    write_json(&directory.join("generation_config.json"), &generation)
}

const CHAT_TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// The printable character that stands for each byte in a byte-level vocabulary: printable Latin-1 for
/// itself, the others from U+0100 on in their order.
fn byte_characters() -> impl Iterator<Item = char> {
    let mut others = '\u{100}'..;
    (0_u8..=255).map(move |byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => others.next().unwrap_or_default(),
    })
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = format!("{value:#}\n");
    fs::write(path, text).map_err(|cause| Error::io("write", path, &cause))
}

/// Makes a seeded model that looks like a real checkpoint.
#[derive(clap::Parser)]
#[command(
    name = "make-model",
    after_help = "Example:\n  tools/make-model --size 4GiB --shards 4 --seed 7 /models/made"
)]
struct Arguments {
    /// The bytes of all tensors together (512MiB, 1.5GiB)
    #[arg(long, default_value = "1GiB")]
    size: ByteSize,
    /// How many safetensors files they are cut into
    #[arg(long, default_value_t = 2)]
    shards: usize,
    /// The same seed, size and shards make the same bytes
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Leave the tensors as holes: takes no disk, reads as zeros
    #[arg(long)]
    sparse: bool,
    /// Add so many files of 1 KiB, below small/
    #[arg(long, value_name = "N", default_value_t = 0)]
    small_files: usize,
    /// Flush the shards and drop them from the page cache
    #[arg(long)]
    cold: bool,
    /// Write into a directory that is not empty, and replace the model in it
    #[arg(long)]
    force: bool,
    /// Where to write; created if need be
    directory: PathBuf,
}

fn main() -> std::process::ExitCode {
    let arguments = <Arguments as clap::Parser>::parse();
    let recipe = Recipe {
        size: arguments.size,
        shards: arguments.shards,
        seed: arguments.seed,
        sparse: arguments.sparse,
        small_files: arguments.small_files,
        force: arguments.force,
        cold: arguments.cold,
    };
    let begun = Instant::now();
    match recipe.write(&arguments.directory) {
        Ok(made) => {
            let seconds = begun.elapsed().as_secs_f64();
            eprintln!(
                "made {}: {} in {} tensors and {} shards, seed {}, {seconds:.1} s ({:.2} GB/s)",
                shown(&arguments.directory),
                ByteSize(made.bytes),
                made.tensors,
                recipe.shards,
                recipe.seed,
                made.bytes as f64 / seconds / 1e9,
            );
            std::process::ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            if let Some(hint) = error.hint_text() {
                eprintln!(" hint: {hint}");
            }
            std::process::ExitCode::from(error.kind().exit_code())
        }
    }
}
