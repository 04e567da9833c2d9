//! Tests of the cache with folders that are damaged, unwritable or on a full disk.

use std::process::Command;

use prost::Message;
use tempfile::TempDir;

use super::*;

struct Files {
    folder: TempDir,
    model: PathBuf,
    cache: PathBuf,
}

impl Files {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        Self::with_cache(folder, cache)
    }

    fn with_cache(folder: TempDir, cache: PathBuf) -> Self {
        let model = folder.path().join("model.onnx");
        fs::write(folder.path().join("weights"), [1; 64]).unwrap();
        fs::write(&model, model_of(&[("w", 0, 64)])).unwrap();
        Self { folder, model, cache }
    }

    fn optimised(&self) -> Optimised {
        Optimised::of(&self.cache, &self.model, "this GPU").unwrap()
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.folder.path().join(name), bytes).unwrap();
    }

    fn contents(&self) -> usize {
        fs::read_dir(&self.cache).unwrap().filter(|entry| entry.as_ref().unwrap().path().is_dir()).count()
    }
}

fn model_of(tensors: &[(&str, u64, u64)]) -> Vec<u8> {
    let tensor = |&(name, offset, bytes): &(&str, u64, u64)| {
        model_file::external(name, &[(bytes / 4) as i64], (offset, bytes))
    };
    model_file::model_of(Vec::new(), tensors.iter().map(tensor).collect()).encode_to_vec()
}

/// Writes the files of a form, as ONNX Runtime does.
fn save(file: &Path) -> io::Result<()> {
    fs::write(file, model_of(&[("a", 0, 8), ("b", 16, 4), ("c", 0, 8)]))?;
    fs::write(file.with_file_name(WEIGHTS), (0..20).collect::<Vec<u8>>())
}

#[test]
fn a_form_is_made_once_and_read_back() {
    let files = Files::new();
    assert!(files.optimised().form("dynamic").is_none());
    let form = files.optimised().keep("dynamic", save).unwrap().unwrap();
    let names: Vec<_> = form.tensors.iter().map(|stored| stored.tensor.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    let again = files.optimised().form("dynamic").unwrap();
    assert_eq!((again.model(), &again.tensors), (form.model(), &form.tensors));
    assert_eq!(again.tensors[1].read(&again.open_weights().unwrap()).unwrap(), [16, 17, 18, 19]);
    assert_eq!(again.tensors[0].fingerprint, again.tensors[2].fingerprint, "the same content");
    assert!(files.optimised().form("N=8").is_none(), "another form is another file");
    again.discard();
    assert!(files.optimised().form("dynamic").is_none());
}

#[test]
fn what_is_damaged_is_not_used() {
    let files = Files::new();
    let form = files.optimised().keep("dynamic", save).unwrap().unwrap();
    fs::write(form.folder.join(WEIGHTS), [9; 20]).unwrap();
    assert!(form.tensors[0].read(&form.open_weights().unwrap()).unwrap_err().to_string().contains("damaged"));
    fs::write(form.folder.join(WEIGHTS), [0; 3]).unwrap();
    assert!(form.tensors[0].read(&form.open_weights().unwrap()).is_err(), "cut off");
    fs::write(form.model(), b"not what was kept").unwrap();
    assert!(files.optimised().form("dynamic").is_none());
    assert!(files.optimised().keep("dynamic", save).unwrap().is_ok(), "created again in its place");
    let failed = files.optimised().keep("other", |_| Err("it cannot be optimised"));
    assert_eq!(failed.err(), Some("it cannot be optimised"));
    let empty = files.optimised().keep("other", |_| Ok::<(), io::Error>(())).unwrap();
    assert!(empty.is_err() && files.optimised().form("other").is_none());
}

#[test]
fn another_content_of_any_file_or_another_environment_is_another_model() {
    let files = Files::new();
    let folders = |files: &Files| files.optimised().folder;
    let first = folders(&files);
    assert_eq!(folders(&files), first);
    let elsewhere = Optimised::of(&files.cache, &files.model, "that GPU").unwrap();
    assert_ne!(elsewhere.folder, first);
    drop(elsewhere);
    files.write("weights", &[2; 64]);
    let second = folders(&files);
    assert_ne!(second, first, "a file beside the model's own");
    files.write("weights", &[1; 64]);
    assert_eq!(folders(&files), first, "the content counts, not the time");
    for byte in 3..8 {
        files.write("weights", &[byte; 64]);
        folders(&files);
    }
    assert_eq!(files.contents(), MAX_CONTENTS);
    fs::remove_file(&files.model).unwrap();
    assert!(Optimised::of(&files.cache, &files.model, "this GPU").is_err());
}

#[test]
fn a_model_that_channels_last_do_not_suit_is_remembered_with_its_content() {
    let files = Files::new();
    let weights = model_file::external("w", &[1, 1, 4, 4], (0, 64));
    let convolution = model_file::node("Conv", "", &["x", "w"]);
    let model = model_file::model_of(vec![convolution], vec![weights]);
    fs::write(&files.model, model.encode_to_vec()).unwrap();
    assert!(files.optimised().channels_last);
    assert!(files.optimised().use_channels_first("it fits on no partition"));
    assert!(!files.optimised().channels_last);
    assert!(Optimised::is_convolutional(&files.cache, &files.model));
    files.write("weights", &[2; 64]);
    assert!(files.optimised().channels_last, "another content");
}

#[test]
fn nothing_remains_of_a_form_that_could_not_be_stored() {
    let files = Files::new();
    let optimised = files.optimised();
    let drafts = || fs::read_dir(&optimised.folder).unwrap().count();
    let half = |file: &Path| fs::write(file, b"half of a model");
    assert!(optimised.keep("dynamic", half).unwrap().is_err());
    assert_eq!(drafts(), 0);
    let full = |file: &Path| {
        save(file).unwrap();
        // Each write to this device fails with ENOSPC, as on a full disk.
        std::os::unix::fs::symlink("/dev/full", file.with_file_name("form.json"))
    };
    let error = optimised.keep("dynamic", full).unwrap().unwrap_err();
    assert_eq!((error.kind(), drafts()), (io::ErrorKind::StorageFull, 0));
    let huge = Optimised { model_bytes: u64::MAX / 2, ..files.optimised() };
    let error = huge.keep("dynamic", save).unwrap().unwrap_err();
    assert!(error.to_string().contains("free disk space"), "{error}");
    assert!(optimised.keep("dynamic", save).unwrap().is_ok(), "space is free again");
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_and_an_index_that_cannot_is_not() {
    let files = Files::new();
    let first = files.optimised().folder;
    fs::remove_file(files.cache.join("index.json")).unwrap();
    fs::create_dir_all(files.cache.join("index.json/in the way")).unwrap();
    assert_eq!(files.optimised().folder, first);
    assert_eq!(fs::read_dir(&files.cache).unwrap().count(), 2, "the draft of the index is removed");
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("file/cache");
    fs::write(folder.path().join("file"), "").unwrap();
    let files = Files::with_cache(folder, cache);
    assert!(Optimised::of(&files.cache, &files.model, "this GPU").is_err());
    assert!(!Optimised::is_convolutional(&files.cache, &files.model));
}

/// A small file system in memory, which is unmounted when this is dropped.
struct SmallFileSystem<'p>(&'p Path);

impl<'p> SmallFileSystem<'p> {
    /// Mounts the file system. Returns `None` if this user cannot mount one.
    fn mount(place: &'p Path) -> Option<Self> {
        let command = ["-t", "tmpfs", "-o", "size=64k", "tmpfs"];
        let mounted = Command::new("mount").args(command).arg(place).output();
        mounted.is_ok_and(|output| output.status.success()).then_some(Self(place))
    }
}

impl Drop for SmallFileSystem<'_> {
    fn drop(&mut self) {
        Command::new("umount").arg("-l").arg(self.0).status().ok();
    }
}

#[test]
fn a_full_file_system_costs_only_the_forms() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    fs::create_dir(&cache).unwrap();
    let Some(_mounted) = SmallFileSystem::mount(&cache) else {
        println!("skipped: this user cannot mount a file system");
        return;
    };
    let files = Files::with_cache(folder, cache.clone());
    let optimised = files.optimised();
    // This write fills the file system, and then fails.
    assert!(fs::write(cache.join("other"), vec![0; 1 << 17]).is_err());
    let kept = optimised.keep("dynamic", save).unwrap();
    assert_eq!(kept.unwrap_err().kind(), io::ErrorKind::StorageFull);
    let unaware = Optimised { model_bytes: 0, ..files.optimised() };
    assert!(unaware.keep("dynamic", save).map_or(true, |kept| kept.is_err()));
    assert_eq!(fs::read_dir(&unaware.folder).unwrap().count(), 0);
    assert!(unaware.use_channels_first("the reason does not fit on the disk"));
    assert!(files.optimised().form("dynamic").is_none());
    fs::remove_file(cache.join("other")).unwrap();
    assert!(optimised.keep("dynamic", save).unwrap().is_ok());
}

#[test]
fn a_worker_locks_its_folder_and_removes_the_drafts_of_killed_workers() {
    let files = Files::new();
    let folder = files.optimised().folder;
    let left = folder.join(format!("0123{DRAFT_MARK}1-0"));
    fs::create_dir(&left).unwrap();
    let first = files.optimised();
    assert!(!left.try_exists().unwrap());
    fs::create_dir(&left).unwrap();
    let second = files.optimised();
    assert!(left.try_exists().unwrap(), "it may be the draft of the first worker");
    drop(first);
    assert!(!remove_unused(&folder));
    drop(second);
    assert!(remove_unused(&folder));
}

#[test]
fn a_damaged_index_is_written_again() {
    let files = Files::new();
    let first = files.optimised().folder;
    fs::write(files.cache.join("index.json"), b"{").unwrap();
    assert_eq!(files.optimised().folder, first);
}
