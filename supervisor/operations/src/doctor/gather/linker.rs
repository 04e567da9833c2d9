//! The dynamic linker's search, done without loading any library: a vendor's library may run code
//! when it is loaded, and that must not happen in the supervisor.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};

use super::command;
use super::elf::Elf;
use crate::doctor::facts::{Missing, Shared};

const MAX_LIBRARIES: usize = 512;

const DEFAULT_DIRS: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// Where `ldconfig` may lie; the PATH of many users does not have its folder.
const LDCONFIG: [&str; 3] = ["/sbin/ldconfig", "/usr/sbin/ldconfig", "ldconfig"];

#[derive(Debug, Clone, Default)]
pub(super) struct Linker {
    /// `LD_LIBRARY_PATH`.
    first: Vec<PathBuf>,
    /// The linker's cache: every file of a name.
    cache: BTreeMap<String, Vec<PathBuf>>,
    last: Vec<PathBuf>,
}

impl Linker {
    /// In the environment that workers inherit.
    pub(super) fn of_this_host() -> Self {
        let first = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let cache = LDCONFIG.iter().find_map(|ldconfig| command::output(ldconfig, &["-p"]).ok());
        Self::new(&first.to_string_lossy(), &cache.unwrap_or_default(), &DEFAULT_DIRS)
    }

    /// `cache`: the output of `ldconfig -p`.
    pub(super) fn new(first: &str, cache: &str, last: &[&str]) -> Self {
        let mut found = BTreeMap::<_, Vec<_>>::new();
        for line in cache.lines() {
            let Some((name, path)) = line.split_once(" => ") else { continue };
            let name = name.trim().split(' ').next().unwrap_or_default();
            found.entry(name.to_owned()).or_default().push(PathBuf::from(path.trim()));
        }
        // Both separate folders.
        let first = first.split([':', ';']).filter(|dir| !dir.is_empty());
        Self {
            first: first.map(PathBuf::from).collect(),
            cache: found,
            last: last.iter().map(PathBuf::from).collect(),
        }
    }

    pub(super) fn find(&self, name: &str, opener: &Path, elf: &Elf) -> Option<PathBuf> {
        let search: Vec<_> = elf.search.iter().map(|dir| origin(dir, opener)).collect();
        self.resolve(name, &search, elf.machine).map(|(path, _)| path)
    }

    pub(super) fn inspect(&self, path: &Path) -> (Shared, Elf) {
        let shared = Shared { path: path.to_owned(), ..Shared::default() };
        match Elf::read(path) {
            Ok(elf) => {
                let missing = self.missing(path, &elf);
                (Shared { needs: elf.needed.clone(), missing, ..shared }, elf)
            }
            Err(why) => (Shared { unreadable: Some(why), ..shared }, Elf::default()),
        }
    }

    fn missing(&self, root: &Path, elf: &Elf) -> Vec<Missing> {
        let machine = elf.machine;
        let mut missing = Vec::new();
        let mut seen = BTreeSet::new();
        let mut waiting = VecDeque::from([(root.to_owned(), elf.clone())]);
        while let Some((path, elf)) = waiting.pop_front() {
            let search: Vec<_> = elf.search.iter().map(|dir| origin(dir, &path)).collect();
            for name in elf.needed {
                if seen.len() >= MAX_LIBRARIES || !seen.insert(name.clone()) {
                    continue;
                }
                match self.resolve(&name, &search, machine) {
                    Some(found) => waiting.push_back(found),
                    None => missing.push(Missing { name, by: file_name(&path) }),
                }
            }
        }
        missing
    }

    /// Libraries for another kind of processor are passed over, as the linker does.
    fn resolve(&self, name: &str, search: &[PathBuf], machine: u16) -> Option<(PathBuf, Elf)> {
        let named = |dirs: &[PathBuf]| dirs.iter().map(|dir| dir.join(name)).collect::<Vec<_>>();
        let cached = self.cache.get(name).cloned().unwrap_or_default();
        let places = [named(&self.first), named(search), cached, named(&self.last)].concat();
        let fitting = |path: PathBuf| {
            let elf = Elf::read(&path).ok().filter(|elf| elf.machine == machine)?;
            Some((path, elf))
        };
        places.into_iter().find_map(fitting)
    }
}

fn origin(dir: &str, library: &Path) -> PathBuf {
    let own = library.parent().unwrap_or(Path::new("."));
    let own = own.to_string_lossy();
    PathBuf::from(dir.replace("${ORIGIN}", &own).replace("$ORIGIN", &own))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This test's own binary: an ELF file, and this host has all libraries that it needs.
    fn own() -> (PathBuf, Elf) {
        let path = std::env::current_exe().unwrap();
        let elf = Elf::read(&path).unwrap();
        (path, elf)
    }

    #[test]
    fn what_runs_here_has_all_that_it_needs() {
        let (path, elf) = own();
        assert!(elf.needed.iter().any(|name| name.starts_with("libc.so")), "{elf:?}");
        let (shared, _) = Linker::of_this_host().inspect(&path);
        assert_eq!((shared.missing, shared.unreadable), (Vec::new(), None));
        assert_eq!(shared.needs, elf.needed);
    }

    #[test]
    fn a_library_that_is_nowhere_is_missing_once_and_named_with_the_library_that_needs_it() {
        let (path, elf) = own();
        let (shared, _) = Linker::default().inspect(&path);
        let names: BTreeSet<_> = shared.missing.iter().map(|missing| missing.name.clone()).collect();
        assert_eq!(names.len(), shared.missing.len());
        assert_eq!(names, elf.needed.into_iter().collect());
        assert!(shared.missing.iter().all(|missing| missing.by == file_name(&path)));
    }

    #[test]
    fn places_are_searched_in_the_linkers_order() {
        let (path, elf) = own();
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| {
            let dir = folder.path().join(name);
            std::fs::create_dir(&dir).unwrap();
            std::os::unix::fs::symlink(&path, dir.join("liba.so.1")).unwrap();
            dir
        };
        let dirs = ["first", "search", "cache", "last"].map(place);
        let found = |first: bool, search: bool, cache: bool| {
            let linker = Linker::new(
                &if first { format!("/nowhere::{}", dirs[0].display()) } else { String::new() },
                &if cache {
                    format!("\tliba.so.1 (libc6,x86-64) => {}/liba.so.1\n", dirs[2].display())
                } else {
                    String::new()
                },
                &[dirs[3].to_str().unwrap()],
            );
            let search = if search { vec![dirs[1].clone()] } else { Vec::new() };
            let (found, _) = linker.resolve("liba.so.1", &search, elf.machine).unwrap();
            found.parent().unwrap().to_owned()
        };
        assert_eq!(found(true, true, true), dirs[0]);
        assert_eq!(found(false, true, true), dirs[1]);
        assert_eq!(found(false, false, true), dirs[2]);
        assert_eq!(found(false, false, false), dirs[3]);
    }

    #[test]
    fn a_file_of_another_kind_is_passed_over() {
        let (path, elf) = own();
        let folder = tempfile::tempdir().unwrap();
        let [text, library] = ["text", "library"].map(|name| folder.path().join(name));
        std::fs::create_dir(&text).unwrap();
        std::fs::create_dir(&library).unwrap();
        std::fs::write(text.join("liba.so.1"), "not a library").unwrap();
        std::os::unix::fs::symlink(&path, library.join("liba.so.1")).unwrap();
        let linker = Linker::new(&format!("{}:{}", text.display(), library.display()), "", &[]);
        assert_eq!(linker.find("liba.so.1", &path, &elf), Some(library.join("liba.so.1")));
        let other = Elf { machine: elf.machine + 1, ..elf };
        assert_eq!(linker.find("liba.so.1", &path, &other), None);
    }

    #[test]
    fn a_library_may_name_its_own_folder() {
        let library = Path::new("/opt/lib/liba.so");
        assert_eq!(origin("$ORIGIN/../nvidia", library), Path::new("/opt/lib/../nvidia"));
        assert_eq!(origin("${ORIGIN}", library), Path::new("/opt/lib"));
        assert_eq!(origin("/usr/local/cuda/lib64", library), Path::new("/usr/local/cuda/lib64"));
    }
}
