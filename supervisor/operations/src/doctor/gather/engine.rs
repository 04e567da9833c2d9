//! ONNX Runtime and the libraries that it needs.

use std::path::{Path, PathBuf};

use super::elf::Elf;
use super::linker::Linker;
use crate::doctor::facts::{EngineFacts, Shared, Trouble, Version};
use shadowslice_config::Config;
use shadowslice_control::host;

const USUAL_CUDNN: &str = "libcudnn.so.9";

pub(super) fn facts(config: Option<&Config>, linker: &Linker) -> EngineFacts {
    let named = config.and_then(|config| config.onnxruntime.library.as_deref());
    let found = host::find_onnxruntime(named).map_err(|error| Trouble::of(&error));
    let (library, elf) = match found {
        Ok(path) => {
            let (shared, elf) = linker.inspect(&path);
            (Ok(shared), elf)
        }
        Err(why) => (Err(why), Elf::default()),
    };
    // It looks for its providers in its own folder.
    let beside = |name: &str| {
        let path = library.as_ref().ok()?.path.with_file_name(format!("libonnxruntime_providers_{name}.so"));
        path.is_file().then(|| linker.inspect(&path))
    };
    let cuda = beside("cuda");
    let cudnn = cudnn(cuda.as_ref(), linker);
    let only = |found: Option<(Shared, Elf)>| found.map(|(shared, _)| shared);
    let (shared, tensorrt) = (only(beside("shared")), only(beside("tensorrt")));
    EngineFacts { version: version(&elf.versions), shared, cuda: only(cuda), tensorrt, cudnn, library }
}

/// From names such as `VERS_1.31.1`.
fn version(names: &[String]) -> Option<Version> {
    let number = |name: &String| {
        let mut parts = name.strip_prefix("VERS_")?.split('.').map(str::parse);
        Some(Version(parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.ok()?))
    };
    names.iter().find_map(number)
}

fn cudnn(provider: Option<&(Shared, Elf)>, linker: &Linker) -> (String, Option<PathBuf>) {
    let own = std::env::current_exe().unwrap_or_default();
    let (opener, elf) = match provider {
        Some((shared, elf)) => (shared.path.as_path(), elf.clone()),
        None => (Path::new(&own), Elf::read(&own).unwrap_or_default()),
    };
    let named = elf.needed.iter().find(|name| name.starts_with("libcudnn.so")).cloned();
    let name = named.unwrap_or_else(|| USUAL_CUDNN.to_owned());
    let found = linker.find(&name, opener, &elf);
    (name, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_off_the_symbols() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(version(&names(&["libonnxruntime.so.1", "VERS_1.31.1"])), Some(Version(1, 31, 1)));
        assert_eq!(version(&names(&["VERS_1.x.1", "GLIBC_2.2.5"])), None);
        assert!(Version(1, 9, 0) < Version(1, 24, 0));
    }
}
