//! Checks that a profile can be written before the measurement starts, because the measurement
//! takes minutes.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::Path;

/// Checks that a file could be written at this path. Does not change or create the file, because
/// the measurement may still fail.
pub(super) fn check_writable(path: &Path) -> io::Result<()> {
    if path.file_name().is_none() || path.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Err(ErrorKind::IsADirectory.into());
    }
    match fs::metadata(path) {
        Ok(found) if found.is_file() || found.is_dir() => OpenOptions::new().write(true).open(path).map(drop),
        // This check must not open a pipe, because closing the pipe would signal the end of the
        // file to its reader.
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => tempfile::tempfile_in(folder(path)).map(drop),
        Err(error) => Err(error),
    }
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_can_be_written_is_left_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("old.yaml"), folder.path().join("new.yaml"));
        fs::write(&old, "a profile").unwrap();
        check_writable(&old).unwrap();
        check_writable(&new).unwrap();
        assert_eq!(fs::read_to_string(&old).unwrap(), "a profile");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no file was created");
    }

    #[test]
    fn a_path_that_cannot_be_written_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let error = check_writable(&folder.path().join("missing/profile.yaml")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        for no_file in ["", "..", "missing/"] {
            assert_eq!(check_writable(Path::new(no_file)).unwrap_err().kind(), ErrorKind::IsADirectory);
        }
        assert_eq!(check_writable(folder.path()).unwrap_err().kind(), ErrorKind::IsADirectory);
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(check_writable(&file.join("profile.yaml")).unwrap_err().kind(), ErrorKind::NotADirectory);
    }

    #[test]
    fn a_bare_name_is_in_the_working_folder_and_a_device_is_not_opened() {
        assert_eq!(folder(Path::new("profile.yaml")), Path::new("."));
        assert_eq!(folder(Path::new("profiles/model.yaml")), Path::new("profiles"));
        check_writable(Path::new("/dev/null")).unwrap();
    }
}
