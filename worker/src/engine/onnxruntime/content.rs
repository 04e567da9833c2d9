//! The content of a model's files. Its digest names the model's optimised forms. An index keeps the
//! digests, so that a worker reads files only if they have changed.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use shadowslice_shared::onnx::external_files;

use super::model_file;

const INDEX: &str = "index.json";

const READ_BYTES: usize = 1 << 22;

/// A SHA-256 digest.
pub(super) type Fingerprint = [u8; 32];

/// The files of a model, and the digest of their content when they were last read.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ContentEntry {
    files: Vec<FileStamp>,
    #[serde(rename = "content")]
    pub(super) fingerprint: Fingerprint,
    /// True if the model is a convolutional network.
    pub(super) convolutional: bool,
}

/// The attributes of a file. If an attribute has changed, the file's content must be read again.
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

impl ContentEntry {
    /// Returns the content of a model. Reads the model's files only if they have changed since the
    /// last read.
    pub(super) fn of(cache: &Path, model: &Path) -> io::Result<Self> {
        if let Some(known) = Self::known(cache, model) {
            return Ok(known);
        }
        let read = Self::read(model)?;
        // If the index cannot be written, the next worker reads the model's files again.
        read.write_to(cache).ok();
        Ok(read)
    }

    /// Returns the content of a model according to the index. Returns `None` if the model's files
    /// have changed, or if they are not in the index.
    pub(super) fn known(cache: &Path, model: &Path) -> Option<Self> {
        let entries = entries(cache).into_iter();
        entries.filter(|entry| entry.is_of(model)).find(|entry| entry.files.iter().all(FileStamp::holds))
    }

    fn read(model: &Path) -> io::Result<Self> {
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
        let convolutional = model_file::is_convolutional(&read);
        Ok(Self { files, fingerprint: whole.finalize().into(), convolutional })
    }

    fn is_of(&self, model: &Path) -> bool {
        self.files.first().is_some_and(|file| file.path == model)
    }

    /// Returns the size of the model's files in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Writes this content to the index, in the place of an older content of the same model.
    fn write_to(&self, cache: &Path) -> io::Result<()> {
        let model = &self.files[0].path;
        let others = entries(cache).into_iter().filter(|entry| !entry.is_of(model)).collect::<Vec<_>>();
        let entries: Vec<&Self> = others.iter().chain([self]).collect();
        fs::create_dir_all(cache)?;
        let draft = cache.join(format!("index.{}", std::process::id()));
        let written = fs::write(&draft, serde_json::to_vec(&entries)?)
            .and_then(|()| fs::rename(&draft, cache.join(INDEX)));
        written.inspect_err(|_| drop(fs::remove_file(&draft)))
    }
}

/// Returns the entries of the index, which are empty if the index is missing or damaged.
fn entries(cache: &Path) -> Vec<ContentEntry> {
    let read = fs::read(cache.join(INDEX)).ok();
    read.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
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
