//! The files of a model, which the supervisor holds open from the load on. Workers that start later
//! load the same content even if the files have changed since then.
//!
//! The content of a file that was replaced or removed remains readable through the open file. The
//! next worker loads a copy, which the supervisor makes from the open files. If a file was
//! overwritten in place, its earlier content is lost, and no worker starts until the model is
//! reloaded.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use sha2::{Digest, Sha256};
use shadowslice_config::{EngineConfig, ModelConfig, model_files};
use shadowslice_datapath::pipeline::ModelContent;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

/// The prefix of the names of folders with copies. The supervisor's process ID follows it.
const COPY_PREFIX: &str = "loaded-";

/// The maximum number of entries of a Python model's folder that a copy links to.
const MAX_LINKS: usize = 1024;

/// The number of bytes that are copied or digested at a time.
const CHUNK_BYTES: usize = 1 << 20;

#[derive(Debug, Default)]
pub struct LoadedFiles {
    /// The path that the configuration names, if the engine has one.
    pub path: Option<PathBuf>,
    /// The description of the content, which clients can also read.
    pub content: Arc<ModelContent>,
    /// True if a check has found files that differ from the loaded ones.
    pub changed: AtomicBool,
    /// True if a worker could not start because the loaded content is lost.
    pub is_lost: AtomicBool,
    files: Vec<LoadedFile>,
    /// The stamps of the files that only the configuration names.
    others: Vec<Option<FileStamp>>,
    /// True if the model may read other files of its folder.
    reads_folder: bool,
    copy: Mutex<Option<CopiedFiles>>,
}

/// A file or the folder of a model.
#[derive(Debug)]
struct LoadedFile {
    path: PathBuf,
    stamp: Option<FileStamp>,
    /// The open file, if it is a regular file.
    held: Option<File>,
    /// The SHA-256 of the loaded content, after it has been computed.
    digest: OnceLock<[u8; 32]>,
}

/// The identity of a file and of its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileStamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    /// The time of the last change of content, names or permissions, in s and ns. A copy in place of
    /// the file can have the same size and modification time, but not the same change time.
    changed: (i64, i64),
}

/// The identities of a model's files, which show whether the files have changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileStamps(Vec<Option<FileStamp>>);

/// The folder of a copy. Dropping this removes the folder.
#[derive(Debug)]
struct CopiedFiles {
    folder: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error(
        "{0} was overwritten since the model was loaded, and workers start only with the loaded content; run \
         `shadowslice reload` to serve the new content"
    )]
    Lost(PathBuf),
    #[error(
        "the model's files have been replaced, and the supervisor cannot copy the loaded files to {to}; free disk \
         space, correct the permissions, or run `shadowslice reload` to serve the new files"
    )]
    Copy {
        to: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl FileStamp {
    fn of(found: &fs::Metadata) -> Self {
        Self {
            device: found.dev(),
            inode: found.ino(),
            bytes: found.size(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        }
    }

    fn at(path: &Path) -> Option<Self> {
        Some(Self::of(&fs::metadata(path).ok()?))
    }
}

impl FileStamps {
    /// Returns the stamps of the model's files, and of those that only its configuration names.
    pub fn of(model: &ModelConfig) -> Self {
        let files = model_files(&model.engine);
        Self(files.iter().map(|path| FileStamp::at(path)).chain(others(model)).collect())
    }
}

#[cfg(test)]
impl FileStamps {
    /// Returns the stamps of files of these sizes, or of missing files.
    pub(crate) fn of_sizes(sizes: &[Option<u64>]) -> Self {
        let (device, inode, modified, changed) = (0, 0, (0, 0), (0, 0));
        let stamp = |bytes| FileStamp { device, inode, bytes, modified, changed };
        Self(sizes.iter().map(|size| size.map(stamp)).collect())
    }
}

/// Returns the stamps of the profile, and of the files with values for the warm-up.
fn others(model: &ModelConfig) -> impl Iterator<Item = Option<FileStamp>> {
    model.profile_path.as_deref().into_iter().chain(model.warmup.files()).map(FileStamp::at)
}

impl LoadedFile {
    fn open(path: PathBuf) -> Self {
        // Opening a pipe would block until the pipe has a writer.
        let is_file = fs::metadata(&path).is_ok_and(|found| found.is_file());
        let held = is_file.then(|| File::open(&path).ok()).flatten();
        let found = held.as_ref().map_or_else(|| fs::metadata(&path), File::metadata);
        Self { path, stamp: found.ok().as_ref().map(FileStamp::of), held, digest: OnceLock::new() }
    }

    fn is_in_place(&self) -> bool {
        FileStamp::at(&self.path) == self.stamp
    }

    /// Returns true if the content of the open file seems to be unchanged.
    fn is_unwritten(&self) -> bool {
        let found = self.held.as_ref().and_then(|file| file.metadata().ok());
        let same = |now: FileStamp, then| now == FileStamp { changed: now.changed, ..then };
        found.zip(self.stamp).is_some_and(|(found, then)| same(FileStamp::of(&found), then))
    }

    /// Reads the open file, writes its content to `to`, and returns the SHA-256.
    fn read_to(&self, to: &mut impl Write) -> io::Result<[u8; 32]> {
        let mut file = self.held.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let (mut digest, mut piece) = (Sha256::new(), vec![0; CHUNK_BYTES]);
        file.rewind()?;
        loop {
            let read = file.read(&mut piece)?;
            if read == 0 {
                return Ok(digest.finalize().into());
            }
            digest.update(&piece[..read]);
            to.write_all(&piece[..read])?;
        }
    }

    fn copy(&self, to: &Path) -> Result<(), FilesError> {
        let write = |source| copy_error(to, source);
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder).map_err(write)?;
        }
        let copied = File::create_new(to).and_then(|mut copy| self.read_to(&mut copy)).map_err(write)?;
        // A new modification time alone does not change the content.
        let is_same = self.digest.get().map_or_else(|| self.is_unwritten(), |digest| *digest == copied);
        if is_same { Ok(()) } else { Err(FilesError::Lost(self.path.clone())) }
    }
}

impl LoadedFiles {
    /// Returns the size of the model's files in bytes, as far as it is known.
    pub fn bytes(&self) -> u64 {
        self.files.iter().filter_map(|file| file.stamp.as_ref()).map(|stamp| stamp.bytes).sum()
    }

    /// Opens the files of a model that is about to be loaded.
    pub fn open(model: &ModelConfig) -> Self {
        let (path, reads_folder) = match &model.engine {
            EngineConfig::OnnxRuntime { path, .. } => (Some(path.clone()), false),
            EngineConfig::Python { path, .. } => (Some(path.clone()), true),
            EngineConfig::Emulated { .. } => (None, false),
        };
        let files = model_files(&model.engine).into_iter().map(LoadedFile::open).collect();
        let loaded_at = path.is_some().then(SystemTime::now);
        let content = Arc::new(ModelContent { loaded_at, ..ModelContent::default() });
        Self { path, content, reads_folder, files, others: others(model).collect(), ..Self::default() }
    }

    /// Returns the stamps of the files at the time when they were opened.
    pub fn stamps(&self) -> FileStamps {
        FileStamps(self.files.iter().map(|file| file.stamp).chain(self.others.iter().copied()).collect())
    }

    /// Returns whether the model's files have changed. A reload reads the files that only the
    /// configuration names anyway, and compares their content.
    pub fn have_changed(&self) -> bool {
        !self.files.iter().all(LoadedFile::is_in_place)
    }

    fn held(&self) -> impl Iterator<Item = &LoadedFile> {
        self.files.iter().filter(|file| file.held.is_some())
    }

    /// Computes the digests of all files, which reads all of them.
    pub fn digest(&self) {
        for file in &self.files {
            if let Ok(digest) = file.read_to(&mut io::sink())
                && file.is_unwritten()
            {
                file.digest.set(digest).ok();
                if self.is_own(&file.path) {
                    let digits = digest.iter().map(|byte| format!("{byte:02x}")).collect();
                    self.content.sha256.set(digits).ok();
                }
            }
        }
    }

    /// Returns true if this is the model's main file.
    fn is_own(&self, file: &Path) -> bool {
        self.path.as_ref().is_some_and(|path| file == path || file == path.join("model.py"))
    }

    /// Returns true if all open files are still at their paths, with the same content.
    pub fn are_in_place(&self) -> bool {
        self.held().all(LoadedFile::is_in_place)
    }

    /// Returns the path that a worker loads. If the files have changed, this is a path in a copy
    /// below `place`.
    ///
    /// # Errors
    ///
    /// Returns an error if the content is lost or cannot be copied.
    pub async fn path_to_load(self: &Arc<Self>, place: &Path) -> Result<Option<PathBuf>, FilesError> {
        let mut copy = self.copy.lock().await;
        if copy.is_none() {
            if self.are_in_place() {
                return Ok(self.path.clone());
            }
            let (files, to) = (Arc::clone(self), place.to_owned());
            let copied = spawn_blocking(move || files.copy_to(&to)).await;
            let copied = copied.unwrap_or_else(|panic| Err(copy_error(place, panic.into())));
            let lost = |error: &FilesError| {
                let is_lost = matches!(error, FilesError::Lost(_));
                self.is_lost.store(is_lost, Ordering::Relaxed);
            };
            *copy = Some(copied.inspect_err(lost)?);
        }
        let made = copy.as_ref().zip(self.path.as_ref());
        Ok(made.map(|(copy, path)| copy.folder.join(self.relative(path))))
    }

    /// Returns the folder to which the paths in a copy are relative.
    fn base(&self) -> &Path {
        let path = self.path.as_deref().unwrap_or(Path::new("/"));
        let is_folder = !self.held().any(|file| file.path == path);
        if is_folder { path } else { path.parent().unwrap_or(path) }
    }

    fn relative<'p>(&self, path: &'p Path) -> &'p Path {
        path.strip_prefix(self.base()).unwrap_or(path)
    }

    /// Copies the content. If the copy fails, removes the files that were already copied.
    fn copy_to(&self, place: &Path) -> Result<CopiedFiles, FilesError> {
        let write = |source| copy_error(place, source);
        fs::create_dir_all(place).map_err(write)?;
        remove_left_copies(place);
        let folder = tempfile::Builder::new()
            .prefix(&format!("{COPY_PREFIX}{}-", std::process::id()))
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .tempdir_in(place)
            .map_err(write)?;
        let copied = CopiedFiles { folder: folder.keep() };
        for file in self.held() {
            file.copy(&copied.folder.join(self.relative(&file.path)))?;
        }
        if self.reads_folder {
            self.link_others(&copied.folder).map_err(|error| copy_error(&copied.folder, error))?;
        }
        Ok(copied)
    }

    /// Creates links to the other entries of the model's folder, which are not held open.
    fn link_others(&self, copy: &Path) -> io::Result<()> {
        for entry in fs::read_dir(self.base())?.take(MAX_LINKS) {
            let entry = entry?;
            if !self.held().any(|file| file.path == entry.path()) {
                symlink(entry.path(), copy.join(entry.file_name()))?;
            }
        }
        Ok(())
    }
}

fn copy_error(to: &Path, source: io::Error) -> FilesError {
    FilesError::Copy { to: to.to_owned(), source }
}

impl Drop for CopiedFiles {
    fn drop(&mut self) {
        // If this fails, the next copy tries again to remove the folder.
        fs::remove_dir_all(&self.folder).ok();
    }
}

/// Removes the copies that other processes left behind when they ended.
fn remove_left_copies(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| name.strip_prefix(COPY_PREFIX)?.split_once('-'));
        let has_ended = |pid: &str| !Path::new("/proc").join(pid).try_exists().unwrap_or(true);
        if maker.is_some_and(|(pid, _)| has_ended(pid)) {
            fs::remove_dir_all(entry.path()).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Returns a configuration of a Python model at this path.
    fn python(path: &Path) -> ModelConfig {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.yaml");
        let yaml = "run_dir: /tmp/x\ngpus: [{device: emulated, sms: 132}]\nmodels:\n  - {name: a, \
                    engine: emulated, slo: 20ms, tensors: [{input: x, output: y, datatype: FP32, shape: [4]}]}\n";
        fs::write(&file, yaml).unwrap();
        let mut config = shadowslice_config::load(&file, &|_| None, false).unwrap();
        let (path, interpreter) = (path.to_owned(), "/usr/bin/python3".into());
        let engine =
            EngineConfig::Python { path, interpreter, threads: 1, step_timeout: Duration::from_secs(10) };
        ModelConfig { engine, ..config.models.remove(0) }
    }

    async fn path_to_load(files: &Arc<LoadedFiles>, place: &Path) -> Result<PathBuf, FilesError> {
        files.path_to_load(place).await.map(|path| path.expect("the engine has a path"))
    }

    fn replace(path: &Path, content: &str) {
        let new = path.with_extension("new");
        fs::write(&new, content).unwrap();
        fs::rename(new, path).unwrap();
    }

    struct Fixture {
        folder: tempfile::TempDir,
        place: tempfile::TempDir,
        files: Arc<LoadedFiles>,
    }

    impl Fixture {
        fn new() -> Self {
            let [folder, place] = [(); 2].map(|()| tempfile::tempdir().unwrap());
            fs::write(folder.path().join("model.py"), "first").unwrap();
            fs::write(folder.path().join("weights"), "one").unwrap();
            fs::create_dir(folder.path().join("labels")).unwrap();
            fs::write(folder.path().join("labels/en"), "cat").unwrap();
            let files = Arc::new(LoadedFiles::open(&python(folder.path())));
            Self { folder, place, files }
        }

        fn file(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }
    }

    #[tokio::test]
    async fn replaced_and_removed_files_are_loaded_from_a_copy_that_goes_with_the_model() {
        let given = Fixture::new();
        assert_eq!(path_to_load(&given.files, given.place.path()).await.unwrap(), given.folder.path());
        replace(&given.file("model.py"), "second");
        fs::remove_file(given.file("weights")).unwrap();
        let copy = path_to_load(&given.files, given.place.path()).await.unwrap();
        let read = |name| fs::read_to_string(copy.join(name)).unwrap();
        assert_eq!(["model.py", "weights", "labels/en"].map(read), ["first", "one", "cat"]);
        assert_eq!(path_to_load(&given.files, given.place.path()).await.unwrap(), copy, "it is made once");
        drop(given.files);
        assert!(!copy.try_exists().unwrap());
    }

    #[tokio::test]
    async fn a_file_that_was_overwritten_is_not_loaded_and_one_that_was_touched_is() {
        let given = Fixture::new();
        given.files.digest();
        let later = SystemTime::now() + Duration::from_secs(60);
        File::options().append(true).open(given.file("weights")).unwrap().set_modified(later).unwrap();
        let copy = path_to_load(&given.files, given.place.path()).await.unwrap();
        assert_eq!(fs::read_to_string(copy.join("weights")).unwrap(), "one");

        let given = Fixture::new();
        fs::write(given.file("weights"), "others").unwrap();
        let why = path_to_load(&given.files, given.place.path()).await.unwrap_err().to_string();
        assert!(why.contains("weights was overwritten") && why.contains("shadowslice reload"), "{why}");
        assert!(given.files.is_lost.load(Ordering::Relaxed));
        assert_eq!(fs::read_dir(given.place.path()).unwrap().count(), 0, "half a copy is removed");
    }

    #[tokio::test]
    async fn an_overwritten_file_of_the_same_size_and_time_is_not_loaded() {
        let given = Fixture::new();
        given.files.digest();
        let file = File::options().write(true).open(given.file("weights")).unwrap();
        let time = file.metadata().unwrap().modified().unwrap();
        (&file).write_all(b"two").unwrap();
        file.set_modified(time).unwrap();
        let refused = path_to_load(&given.files, given.place.path()).await;
        assert!(matches!(refused, Err(FilesError::Lost(_))), "{refused:?}");
    }

    #[test]
    fn the_digest_is_that_of_the_models_own_file() {
        let given = Fixture::new();
        assert_eq!(given.files.content.sha256.get(), None);
        given.files.digest();
        let expected = "a7937b64b8caa58f03721bb6bacf5c78cb235febe0e70b1b84cd99541461a08e";
        assert_eq!(given.files.content.sha256.get().map(String::as_str), Some(expected));
    }

    #[test]
    fn copies_of_processes_that_have_ended_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let left = place.path().join(format!("{COPY_PREFIX}4194305-x"));
        let own = place.path().join(format!("{COPY_PREFIX}{}-x", std::process::id()));
        fs::create_dir(&left).unwrap();
        fs::create_dir(&own).unwrap();
        remove_left_copies(place.path());
        assert!(!left.try_exists().unwrap() && own.try_exists().unwrap());
    }
}
