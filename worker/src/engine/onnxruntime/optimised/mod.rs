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
//! If files of the cache are missing or damaged, the worker creates them again. If it cannot create
//! them, it loads the model's own file.

use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use shadowslice_shared::model_cache::{free_bytes, open_folder, remove_unused};

use super::content::{ContentEntry, Fingerprint};
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

/// The free disk space that a form needs, in sizes of the model's files. A form is about as large as
/// these files, and other programs on the file system need space too.
const ROOM_FACTOR: u64 = 2;

/// The character between the name of a form and the rest of a draft's name.
const DRAFT_MARK: char = '.';

/// The optimised forms of one version of a model's content, for this GPU and this version of ONNX
/// Runtime.
#[derive(Debug)]
pub(super) struct Optimised {
    folder: PathBuf,
    /// The lock that protects the folder while this worker uses it. `None` if the folder cannot be
    /// locked.
    _in_use: Option<File>,
    /// The size of the model's files in bytes.
    model_bytes: u64,
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

impl Optimised {
    /// Opens the cache of a model. `environment` describes everything that influences an optimised
    /// form, apart from the model itself.
    pub(super) fn of(cache: &Path, model: &Path, environment: &str) -> io::Result<Self> {
        // The folder may be missing or unwritable, and still the model's content is known.
        let content = ContentEntry::of(cache, model)?;
        let mut key = Sha256::new_with_prefix(content.fingerprint);
        key.update(environment);
        let folder = cache.join(&hex(&key.finalize())[..32]);
        if !folder.is_dir() {
            fs::create_dir_all(&folder)?;
            forget_others(cache, &folder);
        }
        let channels_last =
            content.convolutional && !folder.join(CHANNELS_FIRST_FILE).try_exists().unwrap_or(true);
        let (_in_use, model_bytes) = (mark_used(&folder), content.bytes());
        Ok(Self { folder, _in_use, model_bytes, channels_last })
    }

    /// Returns true if the model is a convolutional network. Returns false if the model's file cannot
    /// be read.
    pub(super) fn is_convolutional(cache: &Path, model: &Path) -> bool {
        match ContentEntry::known(cache, model) {
            Some(content) => content.convolutional,
            None => model_file::read(model).is_ok_and(|read| model_file::is_convolutional(&read)),
        }
    }

    /// Writes a file that makes later loads of this model use channels first. Returns false if the
    /// file cannot be written.
    pub(super) fn use_channels_first(&self, why: &str) -> bool {
        // Only the existence of the file counts. On a full disk, the reason is missing.
        let created = File::create(self.folder.join(CHANNELS_FIRST_FILE));
        created.map(|mut file| file.write_all(why.as_bytes()).ok()).is_ok()
    }

    /// Returns the form with this name, or `None` if it is missing or damaged.
    pub(super) fn form(&self, name: &str) -> Option<OptimisedForm> {
        OptimisedForm::read(self.folder.join(digest_of(name)))
    }

    /// Creates a form. `save` writes the optimised graph to the given file, and the weights next to
    /// it. Both files are then stored under this name. If this fails, no files remain.
    pub(super) fn keep<E>(
        &self,
        name: &str,
        save: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<io::Result<OptimisedForm>, E> {
        let draft = match Draft::create(self, name) {
            Ok(draft) => draft,
            Err(error) => return Ok(Err(error)),
        };
        save(&draft.0.join("model.onnx"))?;
        Ok(describe(&draft.0).and_then(|()| draft.publish(self.folder.join(digest_of(name)))))
    }
}

/// The folder of a form that is not complete yet. Dropping this removes the folder.
#[derive(Debug)]
struct Draft(PathBuf);

impl Draft {
    fn create(optimised: &Optimised, name: &str) -> io::Result<Self> {
        static DRAFTS: AtomicU64 = AtomicU64::new(0);
        let (folder, needed) = (&optimised.folder, optimised.model_bytes.saturating_mul(ROOM_FACTOR));
        let free = free_bytes(folder)?;
        if free < needed {
            let why = format!(
                "{free} bytes of disk space are free at {}, and this model needs {needed}; free disk space",
                folder.display()
            );
            return Err(io::Error::new(io::ErrorKind::StorageFull, why));
        }
        let number = DRAFTS.fetch_add(1, Ordering::Relaxed);
        let own = format!("{}{DRAFT_MARK}{}-{number}", digest_of(name), std::process::id());
        let draft = Self(folder.join(own));
        // A killed process may have left this folder. If it cannot be removed, neither can it be created.
        fs::remove_dir_all(&draft.0).ok();
        fs::create_dir_all(folder)?;
        fs::create_dir(&draft.0)?;
        Ok(draft)
    }

    fn publish(self, place: PathBuf) -> io::Result<OptimisedForm> {
        fs::remove_dir_all(&place).ok();
        fs::rename(&self.0, &place)?;
        OptimisedForm::read(place).ok_or_else(|| io::Error::other("the stored form cannot be read back"))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After `publish`, nothing is there. If this fails, a later worker removes the folder.
        fs::remove_dir_all(&self.0).ok();
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

/// Locks the folder and sets the time of its last use. If no other worker uses the folder, removes
/// the drafts that killed workers have left there. Returns `None` if the folder cannot be locked.
fn mark_used(folder: &Path) -> Option<File> {
    let file = open_folder(folder).ok()?;
    file.set_modified(SystemTime::now()).ok();
    if file.try_lock().is_ok() {
        for entry in fs::read_dir(folder).ok()?.flatten() {
            if entry.file_name().to_string_lossy().contains(DRAFT_MARK) {
                fs::remove_dir_all(entry.path()).ok();
            }
        }
    }
    file.try_lock_shared().ok().map(|()| file)
}

/// Removes the forms of all versions except the current version and the version that was used last
/// before it. Versions that other workers use remain.
fn forget_others(cache: &Path, current: &Path) {
    let Ok(entries) = fs::read_dir(cache) else { return };
    let folders = entries.filter_map(|entry| {
        let path = entry.ok()?.path();
        let used = fs::metadata(&path).ok().filter(fs::Metadata::is_dir)?.modified().ok()?;
        Some((used, path))
    });
    let mut others: Vec<_> = folders.filter(|(_, path)| path != current).collect();
    others.sort();
    others.reverse();
    for (_, path) in others.into_iter().skip(MAX_CONTENTS - 1) {
        remove_unused(&path);
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
mod tests;
