//! The model maker: what every other test and measurement stands on.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use iloader::Kind;
use iloader::units::ByteSize;
use serde_json::Value;

#[path = "../../tools/make_model.rs"]
#[allow(dead_code, reason = "its main function is the example's")]
pub(crate) mod maker;

use maker::Recipe;

fn recipe(megabytes: u64, shards: usize, seed: u64) -> Recipe {
    Recipe { size: ByteSize(megabytes << 20), shards, seed, ..Recipe::default() }
}

/// Every file below `root` with its bytes.
fn tree(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(root).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if entry.file_type().unwrap().is_dir() {
            files.extend(
                tree(&entry.path()).into_iter().map(|(path, bytes)| (format!("{name}/{path}"), bytes)),
            );
        } else {
            files.insert(name, fs::read(entry.path()).unwrap());
        }
    }
    files
}

/// The tensors of a model: name → type and bytes, read as a safetensors client reads them.
fn tensors(files: &BTreeMap<String, Vec<u8>>) -> BTreeMap<String, (String, Vec<u8>)> {
    let mut tensors = BTreeMap::new();
    for (_, file) in files.iter().filter(|file| file.0.ends_with(".safetensors")) {
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        assert_eq!(length % 8, 0, "the header must be padded to 8 bytes");
        let header: serde_json::Map<String, Value> = serde_json::from_slice(&file[8..8 + length]).unwrap();
        let data = &file[8 + length..];
        let mut end_max = 0;
        for (name, entry) in header.iter().filter(|entry| entry.0 != "__metadata__") {
            let offset = |which: usize| entry["data_offsets"][which].as_u64().unwrap() as usize;
            let dtype = entry["dtype"].as_str().unwrap().to_owned();
            let elements: u64 =
                entry["shape"].as_array().unwrap().iter().map(|side| side.as_u64().unwrap()).product();
            let element = if dtype == "BF16" { 2 } else { 4 };
            assert_eq!(elements * element, (offset(1) - offset(0)) as u64, "{name}");
            end_max = end_max.max(offset(1));
            let bytes = data[offset(0)..offset(1)].to_vec();
            assert!(tensors.insert(name.clone(), (dtype, bytes)).is_none(), "{name} stands in two shards");
        }
        assert_eq!(end_max, data.len(), "bytes behind the last tensor");
    }
    tensors
}

#[test]
fn same_seed_and_options_make_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    for (name, seed) in [("a", 7), ("b", 7), ("c", 8)] {
        recipe(6, 3, seed).write(&directory.path().join(name)).unwrap();
    }
    let [a, b, c] = ["a", "b", "c"].map(|name| tree(&directory.path().join(name)));
    assert_eq!(a, b);
    assert_ne!(a["model-00001-of-00003.safetensors"], c["model-00001-of-00003.safetensors"]);
}

#[test]
fn tensors_do_not_depend_on_the_cut_and_are_finite() {
    let directory = tempfile::tempdir().unwrap();
    let (one, four) = (directory.path().join("one"), directory.path().join("four"));
    let made = recipe(8, 1, 1).write(&one).unwrap();
    recipe(8, 4, 1).write(&four).unwrap();
    let (one, four) = (tree(&one), tree(&four));
    assert_eq!(four.keys().filter(|name| name.ends_with(".safetensors")).count(), 4);
    let tensors = tensors(&one);
    assert_eq!(tensors, self::tensors(&four));
    assert_eq!(tensors.len(), made.tensors);
    assert!(made.bytes <= 8 << 20 && made.bytes > 8 * 1023 * 1024, "{made:?}");

    let index: Value = serde_json::from_slice(&four["model.safetensors.index.json"]).unwrap();
    assert_eq!(index["metadata"]["total_size"], made.bytes);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), made.tensors);
    for (name, (dtype, bytes)) in &tensors {
        let finite = match dtype.as_str() {
            "BF16" => {
                bytes.as_chunks::<2>().0.iter().all(|half| u16::from_le_bytes(*half) & 0x7f80 != 0x7f80)
            }
            _ => bytes.as_chunks::<4>().0.iter().all(|word| f32::from_le_bytes(*word).is_finite()),
        };
        assert!(finite, "{name} has a value that is not finite");
        assert!(bytes.iter().any(|byte| *byte != bytes[0]), "{name} is all one byte");
    }
}

#[test]
fn a_directory_with_something_in_it_is_left_alone_unless_forced() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("mine.txt"), "mine").unwrap();
    let error = recipe(1, 2, 0).write(directory.path()).unwrap_err();
    assert_eq!(error.kind(), Kind::InUse);
    assert_eq!(tree(directory.path()).len(), 1);

    let forced = Recipe { force: true, ..recipe(1, 3, 0) };
    forced.write(directory.path()).unwrap();
    Recipe { shards: 2, ..forced }.write(directory.path()).unwrap();
    let files = tree(directory.path());
    assert_eq!(files["mine.txt"], b"mine");
    assert!(!files.keys().any(|name| name.ends_with("-of-00003.safetensors")), "{:?}", files.keys());
}

#[test]
fn sparse_models_and_small_files() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir().unwrap();
    let sparse = Recipe { sparse: true, small_files: 1001, size: ByteSize(3 << 30), ..recipe(0, 1, 0) };
    let made = sparse.write(directory.path()).unwrap();
    let shard = fs::metadata(directory.path().join("model-00001-of-00001.safetensors")).unwrap();
    assert!(shard.len() > made.bytes && made.bytes > 2 << 30);
    assert!(shard.blocks() * 512 < 1 << 20, "{} blocks are allocated", shard.blocks());
    let small = tree(&directory.path().join("small"));
    assert_eq!(small.len(), 1001);
    assert!(small.values().all(|bytes| bytes.len() == 1024));
    assert_ne!(small["000/000000.bin"], small["001/001000.bin"]);
}

#[test]
fn sizes_and_shards_that_make_no_model_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("none");
    for (size, shards) in [(1 << 10, 1), (1 << 20, 0), (1 << 20, 100_000)] {
        let recipe = Recipe { size: ByteSize(size), shards, ..Recipe::default() };
        assert_eq!(recipe.write(&path).unwrap_err().kind(), Kind::Usage);
    }
    assert!(!path.exists(), "a refused model must leave nothing");
}

#[test]
fn every_number_of_shards_has_no_empty_one() {
    let directory = tempfile::tempdir().unwrap();
    let tensors = recipe(1, 1, 0).write(&directory.path().join("1")).unwrap().tensors;
    for shards in (2..=12).chain(tensors - 2..=tensors) {
        let path = directory.path().join(shards.to_string());
        Recipe { sparse: true, ..recipe(1, shards, 0) }.write(&path).unwrap();
        let index: Value =
            serde_json::from_slice(&fs::read(path.join("model.safetensors.index.json")).unwrap()).unwrap();
        let used: std::collections::BTreeSet<&str> =
            index["weight_map"].as_object().unwrap().values().filter_map(Value::as_str).collect();
        assert_eq!(used.len(), shards);
        for name in used {
            assert!(path.join(name).is_file(), "{name}");
        }
    }
}
