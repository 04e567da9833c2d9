//! The cache of optimised models. ONNX Runtime optimises a model once for a GPU, and every later
//! session loads the result.
//!
//! ```text
//! CACHE/index.json                  the digest of each model's content, by file size and time
//! CACHE/CONTENT-…/FORM/model.onnx   the optimised graph
//!                     /weights      its large tensors
//!                     /form.json    their offsets and digests
//! CACHE/CONTENT-…/channels-first    the reason why convolutions do not use channels last
//! ```
//!
//! A form is the optimised model, either for all shapes or for fixed lengths of its dynamic axes.
//! If files of the cache are missing or damaged, the worker creates them again.

use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use shadowslice_shared::onnx::external_files;

use super::model_file::{self, ExternalTensor};

/// The minimum size of a large tensor, in bytes. Smaller tensors stay in the optimised graph, and
/// each session has its own copy of them. Some of the smaller tensors are shapes, which ONNX
/// Runtime needs in host memory.
pub(super) const LARGE_TENSOR_BYTES: u64 = 4096;

/// The number of versions of a model's content that the cache keeps: the current version, and the
/// newest of the other versions.
const MAX_CONTENTS: usize = 2;

/// The file that exists if channels last failed for the model. The file contains the reason.
const CHANNELS_FIRST_FILE: &str = "channels-first";

const READ_BYTES: usize = 1 << 22;

/// A SHA-256 digest.
pub(super) type Fingerprint = [u8; 32];

/// The optimised forms of one version of a model's content, for this GPU and this version of ONNX
/// Runtime.
#[derive(Debug)]
pub(super) struct Optimised {
    folder: PathBuf,
    /// True if convolutions use channels last.
    pub(super) channels_last: bool,
}

/// An optimised form of a model, stored in its own folder.
#[derive(Debug)]
pub(super) struct OptimisedForm {
    folder: PathBuf,
    pub(super) tensors: Vec<StoredTensor>,
}

/// A large tensor in the form's file `weights`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StoredTensor {
    #[serde(flatten)]
    pub(super) tensor: ExternalTensor,
    pub(super) fingerprint: Fingerprint,
}

impl StoredTensor {
    /// Returns the part of the form's weights file that contains the tensor, in bytes.
    pub(super) fn part(&self) -> Range<u64> {
        self.tensor.offset..self.tensor.offset + self.tensor.bytes
    }

    /// Reads the bytes of the tensor. Returns an error if the bytes are damaged.
    pub(super) fn read(&self, weights: &File) -> io::Result<Vec<u8>> {
        let bytes = self.tensor.read(weights)?;
        match fingerprint_of(&bytes) == self.fingerprint {
            true => Ok(bytes),
            false => {
                Err(io::Error::other(format!("the stored weights of `{}` are damaged", self.tensor.name)))
            }
        }
    }
}

/// The content of the file `form.json`, which describes a form.
#[derive(Serialize, Deserialize)]
struct Description {
    /// The digest of the optimised graph's file.
    model: Fingerprint,
    tensors: Vec<StoredTensor>,
}

/// The files of a model, and the digest of their content when they were last read.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct IndexEntry {
    files: Vec<FileStamp>,
    content: Fingerprint,
    /// True if the model is a convolutional network.
    convolutional: bool,
}

/// The attributes of a file. If an attribute has changed, the cache reads the file's content again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct FileStamp {
    path: PathBuf,
    bytes: u64,
    modified: (i64, i64),
    inode: u64,
}

impl FileStamp {
    fn of(path: &Path) -> io::Result<Self> {
        let found = fs::metadata(path)?;
        let modified = (found.mtime(), found.mtime_nsec());
        Ok(Self { path: path.to_owned(), bytes: found.len(), modified, inode: found.ino() })
    }

    fn holds(&self) -> bool {
        Self::of(&self.path).is_ok_and(|now| now == *self)
    }
}

impl Optimised {
    /// Opens the cache of a model. `environment` describes everything that influences an optimised
    /// form, apart from the model itself.
    pub(super) fn of(cache: &Path, model: &Path, environment: &str) -> io::Result<Self> {
        fs::create_dir_all(cache)?;
        let IndexEntry { content, convolutional, .. } = content(cache, model)?;
        let mut key = Sha256::new_with_prefix(content);
        key.update(environment);
        let folder = cache.join(&hex(&key.finalize())[..32]);
        if !folder.is_dir() {
            fs::create_dir_all(&folder)?;
            forget_others(cache, &folder);
        }
        let channels_last = convolutional && !folder.join(CHANNELS_FIRST_FILE).try_exists().unwrap_or(true);
        Ok(Self { folder, channels_last })
    }

    /// Returns true if the model is a convolutional network. Returns false if the model's content
    /// cannot be read.
    pub(super) fn is_convolutional(cache: &Path, model: &Path) -> bool {
        let known = fs::create_dir_all(cache).and_then(|()| content(cache, model));
        known.is_ok_and(|entry| entry.convolutional)
    }

    /// Writes a file that makes later loads of this model use channels first. Returns false if the
    /// file cannot be written.
    pub(super) fn use_channels_first(&self, why: &str) -> bool {
        fs::write(self.folder.join(CHANNELS_FIRST_FILE), why).is_ok()
    }

    /// Returns the form with this name, or `None` if it is missing or damaged.
    pub(super) fn form(&self, name: &str) -> Option<OptimisedForm> {
        OptimisedForm::read(self.folder.join(digest_of(name)))
    }

    /// Creates a form. `save` writes the optimised graph to the given file, and the weights next to
    /// it. Both files are then stored under this name.
    pub(super) fn keep<E>(
        &self,
        name: &str,
        save: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<io::Result<OptimisedForm>, E> {
        let own = format!("{}.{}", digest_of(name), std::process::id());
        let (draft, place) = (self.folder.join(own), self.folder.join(digest_of(name)));
        // A killed process may have left this folder. If the folder cannot be removed, the code
        // below cannot create it, and returns that error.
        fs::remove_dir_all(&draft).ok();
        if let Err(error) = fs::create_dir_all(&draft) {
            return Ok(Err(error));
        }
        if let Err(error) = save(&draft.join("model.onnx")) {
            fs::remove_dir_all(&draft).ok();
            return Err(error);
        }
        Ok(describe(&draft).and_then(|()| {
            fs::remove_dir_all(&place).ok();
            fs::rename(&draft, &place)?;
            OptimisedForm::read(place).ok_or_else(|| io::Error::other("the stored form cannot be read back"))
        }))
    }
}

impl OptimisedForm {
    fn read(folder: PathBuf) -> Option<Self> {
        let description: Description =
            serde_json::from_slice(&fs::read(folder.join("form.json")).ok()?).ok()?;
        let form = Self { folder, tensors: description.tensors };
        let model = fs::read(form.model()).ok()?;
        (fingerprint_of(&model) == description.model).then_some(form)
    }

    pub(super) fn model(&self) -> PathBuf {
        self.folder.join("model.onnx")
    }

    /// Opens the file of the form's large tensors. It can be read even after the form was removed.
    pub(super) fn open_weights(&self) -> io::Result<File> {
        File::open(self.folder.join(WEIGHTS))
    }

    pub(super) fn discard(self) {
        fs::remove_dir_all(self.folder).ok();
    }
}

/// The name of the file in which ONNX Runtime stores a form's large tensors.
pub(super) const WEIGHTS: &str = "weights";

fn describe(draft: &Path) -> io::Result<()> {
    let model = draft.join("model.onnx");
    let path = draft.join(WEIGHTS);
    // ONNX Runtime writes no file if the model has no large tensors, so this call may create the
    // file.
    let weights = File::options().read(true).append(true).create(true).open(path)?;
    let stored = |tensor: ExternalTensor| {
        Ok(StoredTensor { fingerprint: fingerprint_of(&tensor.read(&weights)?), tensor })
    };
    let tensors = model_file::external_tensors(&model_file::read(&model)?)?;
    let tensors = tensors.into_iter().map(stored).collect::<io::Result<_>>()?;
    let description = Description { model: fingerprint_of(&fs::read(&model)?), tensors };
    fs::write(draft.join("form.json"), serde_json::to_vec(&description)?)
}

/// Returns the digest of a model's content. Reads the model's files only if they have changed since
/// the last read.
fn content(cache: &Path, model: &Path) -> io::Result<IndexEntry> {
    let index = cache.join("index.json");
    let known =
        fs::read(&index).ok().and_then(|bytes| serde_json::from_slice::<Vec<IndexEntry>>(&bytes).ok());
    let mut entries = known.unwrap_or_default();
    let of_model = |entry: &IndexEntry| entry.files.first().is_some_and(|file| file.path == model);
    let same = |entry: &&IndexEntry| of_model(entry) && entry.files.iter().all(FileStamp::holds);
    if let Some(known) = entries.iter().position(|entry| same(&entry)) {
        return Ok(entries.swap_remove(known));
    }
    let beside = model.parent().unwrap_or(Path::new("."));
    let read = model_file::read(model)?;
    let further = external_files(read.tensors()).into_iter().map(|file| beside.join(file));
    let paths: Vec<PathBuf> = Some(model.to_owned()).into_iter().chain(further).collect();
    // The attributes are read before the content. If a file changes between these two reads, the
    // attributes differ at the next start, and the file is read again.
    let files = paths.iter().map(|path| FileStamp::of(path)).collect::<io::Result<Vec<_>>>()?;
    let mut whole = Sha256::new();
    for path in &paths {
        whole.update(of_file(path)?);
    }
    let content = whole.finalize().into();
    entries.retain(|entry| !of_model(entry));
    entries.push(IndexEntry { files, content, convolutional: model_file::is_convolutional(&read) });
    let draft = cache.join(format!("index.{}", std::process::id()));
    fs::write(&draft, serde_json::to_vec(&entries)?)?;
    fs::rename(draft, index)?;
    Ok(entries.swap_remove(entries.len() - 1))
}

fn of_file(path: &Path) -> io::Result<Fingerprint> {
    let (mut file, mut digest) = (File::open(path)?, Sha256::new());
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(digest.finalize().into());
        }
        digest.update(&buffer[..read]);
    }
}

/// Removes the forms of all versions except the current version and the newest other version.
/// Another worker may still use a removed version. If that worker needs another form, it loads the
/// model's own file.
fn forget_others(cache: &Path, current: &Path) {
    let Ok(entries) = fs::read_dir(cache) else { return };
    let folders = entries.filter_map(|entry| {
        let path = entry.ok()?.path();
        let made = fs::metadata(&path).ok().filter(fs::Metadata::is_dir)?.modified().ok()?;
        Some((made, path))
    });
    let mut others: Vec<_> = folders.filter(|(_, path)| path != current).collect();
    others.sort();
    others.reverse();
    for (_, path) in others.into_iter().skip(MAX_CONTENTS - 1) {
        fs::remove_dir_all(path).ok();
    }
}

fn fingerprint_of(bytes: &[u8]) -> Fingerprint {
    Sha256::digest(bytes).into()
}

fn digest_of(name: &str) -> String {
    hex(&fingerprint_of(name.as_bytes()))[..16].to_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
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
            let (model, cache) = (folder.path().join("model.onnx"), folder.path().join("cache"));
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
        assert!(
            form.tensors[0].read(&form.open_weights().unwrap()).unwrap_err().to_string().contains("damaged")
        );
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
    fn a_damaged_index_is_written_again() {
        let files = Files::new();
        let first = files.optimised().folder;
        fs::write(files.cache.join("index.json"), b"{").unwrap();
        assert_eq!(files.optimised().folder, first);
    }
}
