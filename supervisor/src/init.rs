//! A model and a configuration to begin with.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The names and the contents of the files.
const FILES: [(&str, &str); 2] = [
    ("model.py", include_str!("../../configs/python/first/model.py")),
    ("shadowslice.yaml", include_str!("../../configs/python/first/shadowslice.yaml")),
];

#[derive(Debug, thiserror::Error)]
pub(crate) enum InitError {
    #[error("cannot create the folder {0}")]
    Folder(PathBuf, #[source] io::Error),
    #[error("{0} already exists; choose another folder")]
    There(PathBuf),
    #[error("cannot write {0}")]
    Write(PathBuf, #[source] io::Error),
}

/// Writes the files, but overwrites none. Returns the message for the user.
pub(crate) fn write(folder: &Path) -> Result<String, InitError> {
    fs::create_dir_all(folder).map_err(|error| InitError::Folder(folder.to_owned(), error))?;
    let paths = FILES.map(|(name, text)| (folder.join(name), text));
    if let Some((there, _)) = paths.iter().find(|(path, _)| path.symlink_metadata().is_ok()) {
        return Err(InitError::There(there.clone()));
    }
    for (path, text) in &paths {
        let written = OpenOptions::new().write(true).create_new(true).open(path);
        let written = written.and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| InitError::Write(path.clone(), error))?;
    }
    let [(model, _), (config, _)] = &paths;
    Ok(format!(
        "wrote the model {}; to serve it, run\n  shadowslice serve {}",
        model.display(),
        config.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let new = folder.path().join("a/b");
        assert!(write(&new).unwrap().contains("serve"));
        fs::write(new.join("model.py"), "mine").unwrap();
        fs::remove_file(new.join("shadowslice.yaml")).unwrap();
        assert!(matches!(write(&new), Err(InitError::There(path)) if path.ends_with("model.py")));
        assert_eq!(fs::read(new.join("model.py")).unwrap(), b"mine");
        assert!(!new.join("shadowslice.yaml").try_exists().unwrap());
    }
}
