//! The cache of optimised models and engines: the choice of its folder, and the removal of models that
//! no worker uses.
//!
//! Workers write optimised models, and lock those that they use (`shadowslice_shared::model_cache`).

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, DirEntry, File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};
use nix::unistd::{AccessFlags, eaccess, geteuid};
use shadowslice_shared::errors;
use shadowslice_shared::model_cache::{OPTIMISED, free_bytes, open_folder, remove_unused};
use tokio::sync::watch;

use crate::controller::ModelState;
use crate::models::ModelSet;
use crate::run_dir::unsafe_because;

/// The name of the cache in the run directory.
const IN_RUN_DIR: &str = "tensorrt";

/// The folder for caches of this program, inside the folder for caches of all programs.
const PROGRAM: &str = "shadowslice";

/// The type of the file system ramfs, from Linux's `magic.h`.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);

/// The mode of a folder that all users can enter and list.
const LISTED: u32 = 0o755;

/// The time between two searches for models to remove.
const TRIM_INTERVAL: Duration = Duration::from_mins(10);

#[derive(Debug, thiserror::Error)]
enum FolderError {
    #[error("cannot create or write to {path}")]
    Unwritable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} {why}")]
    Unsafe { path: PathBuf, why: &'static str },
}

/// Returns the folder of the cache, which exists afterwards if possible. `place` is a folder in the run
/// directory, whose mode the cache gets.
pub fn folder(place: &Path) -> PathBuf {
    let mode = fs::metadata(place).map_or(0o700, |found| found.mode() & 0o777);
    let place = &fs::canonicalize(place).unwrap_or_else(|_| place.to_owned());
    let candidates = candidates(place, geteuid().is_root(), &|name| std::env::var_os(name));
    let usable = |candidate: &PathBuf| {
        let failed = |error: &FolderError| {
            let why = errors::chain(error);
            tracing::warn!(
                why,
                "cannot store optimised models in a folder, so the supervisor uses another one; correct its permissions, or set CACHE_DIRECTORY"
            );
        };
        prepare(candidate, mode).inspect_err(failed).is_ok()
    };
    let folder = candidates.into_iter().find(usable).unwrap_or_else(|| place.join(IN_RUN_DIR));
    tracing::info!(folder = %folder.display(), "optimised models and engines are stored in this folder");
    folder
}

/// Returns the folders to try before the run directory. The host's folder for caches may have those of
/// several supervisors, so the name is that of the run directory there.
fn candidates(place: &Path, is_root: bool, variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let folder = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    // systemd separates several folders by colons.
    let given = variable("CACHE_DIRECTORY").and_then(|given| Some(given.to_str()?.split(':').next()?.into()));
    let given = given.filter(|path: &PathBuf| path.is_absolute());
    let user = || folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
    let of_host = if is_root { Some(PathBuf::from("/var/cache")) } else { user() };
    let of_host = of_host.filter(|caches| is_in_memory(place) && !is_in_memory(caches));
    let name = place.to_string_lossy().trim_start_matches('/').replace('/', "-");
    let of_host = of_host.map(|caches| caches.join(PROGRAM).join(name));
    let given = given.map(|caches| caches.join(place.file_name().unwrap_or_default()));
    given.into_iter().chain(of_host).collect()
}

/// Returns true if the files of a folder are in the host's memory.
fn is_in_memory(path: &Path) -> bool {
    // The folder itself may be missing.
    let found = path.ancestors().find_map(|path| statfs(path).ok());
    found.map(|found| found.filesystem_type()).is_some_and(|kind| [TMPFS_MAGIC, RAMFS_MAGIC].contains(&kind))
}

/// Creates the folder with this mode, in a folder that other caches may share.
fn prepare(folder: &Path, mode: u32) -> Result<(), FolderError> {
    if let Some(caches) = folder.parent() {
        prepare_own(caches, LISTED)?;
    }
    prepare_own(folder, mode)?;
    let writable = eaccess(folder, AccessFlags::W_OK | AccessFlags::X_OK);
    writable.map_err(|error| FolderError::Unwritable { path: folder.to_owned(), source: error.into() })
}

/// Creates a folder with this mode if it does not exist. Only this user may write to it.
fn prepare_own(path: &Path, mode: u32) -> Result<(), FolderError> {
    let found = match unsafe_because(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => create(path, mode).map(|()| None),
        found => found,
    };
    match found {
        Ok(None) => Ok(()),
        Ok(Some(why)) => Err(FolderError::Unsafe { path: path.to_owned(), why }),
        Err(source) => Err(FolderError::Unwritable { path: path.to_owned(), source }),
    }
}

fn create(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(path)?;
    // The umask may have removed bits.
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Removes models that no worker uses, from time to time and forever. Models that are about to start a
/// worker may use any model, so nothing is removed until all of them are ready.
pub async fn keep_trimmed(folder: PathBuf, models_rx: watch::Receiver<Arc<ModelSet>>) {
    let has_settled = |state: &ModelState| matches!(state, ModelState::Ready | ModelState::Unready { .. });
    loop {
        tokio::time::sleep(TRIM_INTERVAL).await;
        if models_rx.borrow().served.iter().all(|model| has_settled(&model.report.borrow().state)) {
            let folder = folder.clone();
            // If this fails, the next search follows.
            tokio::task::spawn_blocking(move || free_bytes(&folder).map(|free| trim(&folder, free)))
                .await
                .ok();
        }
    }
}

/// A version of a model in the cache.
struct CachedModel {
    /// The time when a worker last started to use the version.
    used: SystemTime,
    bytes: u64,
    model: OsString,
    version: OsString,
}

/// Removes the models that were used least recently, until the cache takes no more space than is `free`.
fn trim(cache: &Path, mut free: u64) {
    let mut models = cached_models(cache);
    models.sort_by_key(|model| model.used);
    let mut size: u64 = models.iter().map(|model| model.bytes).sum();
    for CachedModel { bytes, model, version, .. } in models {
        if size <= free {
            return;
        }
        if open_versions(cache, &model).is_ok_and(|versions| remove_unused(&pinned(&versions).join(version)))
        {
            (size, free) = (size - bytes, free.saturating_add(bytes));
            tracing::info!(
                ?model,
                bytes,
                "removed an optimised model that no worker uses, to free disk space"
            );
        }
    }
}

fn cached_models(cache: &Path) -> Vec<CachedModel> {
    let mut models = Vec::new();
    for model in entries(cache).map(|entry| entry.file_name()) {
        let Ok(versions) = open_versions(cache, &model) else { continue };
        models.extend(entries(&pinned(&versions)).filter_map(|version| {
            let found = version.metadata().ok().filter(fs::Metadata::is_dir)?;
            let (used, bytes) = (found.modified().ok()?, size_of(&version.path()));
            Some(CachedModel { used, bytes, model: model.clone(), version: version.file_name() })
        }));
    }
    models
}

/// Opens the folder of a model's optimised versions. The folder may belong to the user of the model's
/// workers, who could replace it by a link to any folder. Paths through [`pinned`] stay inside it.
fn open_versions(cache: &Path, model: &OsStr) -> io::Result<File> {
    let model = open_folder(&cache.join(model))?;
    open_folder(&pinned(&model).join(OPTIMISED))
}

fn pinned(folder: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd()))
}

/// Returns the size on disk of the files of a version, in bytes.
fn size_of(version: &Path) -> u64 {
    /// The size of the blocks that `stat` counts.
    const BLOCK_BYTES: u64 = 512;
    let forms = entries(version).filter(|form| form.file_type().is_ok_and(|kind| kind.is_dir()));
    let files = forms.flat_map(|form| entries(&form.path()));
    files.filter_map(|file| Some(file.metadata().ok()?.blocks() * BLOCK_BYTES)).sum()
}

fn entries(folder: &Path) -> impl Iterator<Item = DirEntry> + use<> {
    fs::read_dir(folder).into_iter().flatten().flatten()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_run_directory_on_a_disk_keeps_the_cache_unless_a_folder_is_given() {
        let disk = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let home = disk.path().to_owned();
        let variable = |name: &str| (name == "HOME").then(|| home.clone().into_os_string());
        if is_in_memory(disk.path()) || !is_in_memory(Path::new("/dev/shm")) {
            println!("skipped: this host has no disk or no /dev/shm");
            return;
        }
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        assert!(candidates(disk.path(), false, &variable).is_empty());
        let found = candidates(memory.path(), false, &variable);
        let name = memory.path().file_name().unwrap().to_str().unwrap();
        assert_eq!(found, [home.join(format!(".cache/shadowslice/dev-shm-{name}"))]);
        let in_memory = |name: &str| (name == "XDG_CACHE_HOME").then(|| memory.path().into());
        assert!(candidates(memory.path(), false, &in_memory).is_empty(), "no better than the run directory");
        let given = |name: &str| (name == "CACHE_DIRECTORY").then(|| "/var/cache/a:/var/cache/b".into());
        let private = |place: &Path| candidates(&place.join("private"), true, &given).swap_remove(0);
        assert_eq!(private(disk.path()), Path::new("/var/cache/a/private"));
        assert_eq!(private(memory.path()), Path::new("/var/cache/a/private"), "for each run directory");
    }

    #[test]
    fn the_cache_is_private_and_what_others_could_change_is_refused() {
        let host = tempfile::tempdir().unwrap();
        let caches = host.path().join("caches");
        let folder = caches.join("private");
        prepare(&folder, 0o700).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&caches), mode(&folder)), (0o755, 0o700));
        prepare(&folder, 0o700).unwrap();
        fs::set_permissions(&caches, Permissions::from_mode(0o777)).unwrap();
        let why = |folder: &Path| prepare(folder, 0o700).unwrap_err().to_string();
        assert!(why(&folder).contains("writable by other users"));
        let file = host.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(why(&file.join("private")).contains("is not a folder"));
        assert!(why(&file.join("below/private")).contains("cannot create or write to"));
    }

    /// Creates a version of a model, last used at this time.
    fn version(cache: &Path, model: &str, name: &str, used: u64) -> PathBuf {
        let version = cache.join(model).join(OPTIMISED).join(name);
        fs::create_dir_all(version.join("form")).unwrap();
        fs::write(version.join("form/weights"), vec![1; 1 << 16]).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(used);
        open_folder(&version).unwrap().set_modified(time).unwrap();
        version
    }

    #[test]
    fn the_models_used_least_recently_are_removed_and_those_in_use_are_not() {
        let cache = tempfile::tempdir().unwrap();
        let cache = cache.path();
        let all = [("a", "1"), ("b", "2"), ("b", "3"), ("c", "4")];
        let [in_use, oldest, newer, newest] =
            all.map(|(model, name)| version(cache, model, name, name.parse().unwrap()));
        let lock = open_folder(&in_use).unwrap();
        lock.try_lock_shared().unwrap();
        let bytes = size_of(&newest);
        assert!(bytes >= 1 << 16);
        trim(cache, 4 * bytes);
        assert!(oldest.try_exists().unwrap(), "there is space for as much again");
        trim(cache, 3 * bytes);
        assert_eq!([&in_use, &oldest, &newer].map(|path| path.try_exists().unwrap()), [true, false, true]);
        trim(cache, 0);
        assert!(in_use.try_exists().unwrap() && !newer.try_exists().unwrap(), "all but those in use");
    }

    #[test]
    fn a_link_leads_to_no_other_folder() {
        let place = tempfile::tempdir().unwrap();
        let (cache, precious) = (place.path().join("cache"), place.path().join("precious"));
        let kept = version(&precious, "m", "1", 1);
        fs::create_dir_all(cache.join("a")).unwrap();
        symlink(precious.join("m").join(OPTIMISED), cache.join("a").join(OPTIMISED)).unwrap();
        symlink(precious.join("m"), cache.join("b")).unwrap();
        fs::create_dir_all(cache.join("c").join(OPTIMISED)).unwrap();
        symlink(&kept, cache.join("c").join(OPTIMISED).join("1")).unwrap();
        trim(&cache, 0);
        assert!(kept.join("form/weights").try_exists().unwrap());
    }
}
