//! The users of models' workers, if each model has its own user.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::path::Path;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// A user that belongs to one model while this value exists.
#[derive(Debug)]
pub struct User {
    pub(crate) id: u32,
    model: String,
}

#[derive(Debug)]
pub struct Users {
    range: RangeInclusive<u32>,
    taken: Mutex<BTreeMap<u32, Weak<User>>>,
}

#[derive(Debug, thiserror::Error)]
#[error("each of the users {} to {} already has a model; add users to workers.users", .0.start(), .0.end())]
pub struct NoUser(RangeInclusive<u32>);

impl Users {
    pub fn new(range: RangeInclusive<u32>) -> Self {
        Self { range, taken: Mutex::default() }
    }

    /// Returns the user of a model. All instances of the model have the same user, and usually keep
    /// it after a restart, so the model can use its cached files again.
    pub(crate) fn of(&self, model: &str) -> Result<Arc<User>, NoUser> {
        let mut taken = self.taken.lock();
        taken.retain(|_, user| user.strong_count() > 0);
        if let Some(user) = taken.values().filter_map(Weak::upgrade).find(|user| user.model == model) {
            return Ok(user);
        }
        let (first, count) = (*self.range.start(), u64::from(self.range.end() - self.range.start()) + 1);
        let mut hash = DefaultHasher::new();
        model.hash(&mut hash);
        let start = u32::try_from(hash.finish() % count).expect("below a count of 32 bits");
        let from = first + start;
        let id = (from..=*self.range.end()).chain(first..from).find(|id| !taken.contains_key(id));
        let id = id.ok_or_else(|| NoUser(self.range.clone()))?;
        let user = Arc::new(User { id, model: model.to_owned() });
        taken.insert(id, Arc::downgrade(&user));
        Ok(user)
    }
}

impl User {
    /// Creates a folder that belongs to this user. Other users can enter its parent but cannot list
    /// it. Removes a folder that another user left there, because its files could be links to any
    /// file.
    pub(crate) fn give(&self, folder: &Path) -> io::Result<()> {
        match fs::symlink_metadata(folder) {
            Ok(found) if found.uid() == self.id => return Ok(()),
            Ok(_) => fs::remove_dir_all(folder)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        fs::create_dir_all(folder)?;
        if let Some(parent) = folder.parent() {
            fs::set_permissions(parent, fs::Permissions::from_mode(0o711))?;
        }
        fs::set_permissions(folder, fs::Permissions::from_mode(0o700))?;
        lchown(folder, Some(self.id), Some(self.id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_theirs_and_what_another_user_left_there_goes() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: only root gives folders away");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let (folder, other) = (place.path().join("engines/m"), place.path().join("other"));
        fs::write(&other, "").unwrap();
        let user = |id| User { id, model: "m".to_owned() };
        user(70_001).give(&folder).unwrap();
        std::os::unix::fs::symlink(&other, folder.join("link")).unwrap();
        user(70_001).give(&folder).unwrap();
        assert!(folder.join("link").is_symlink(), "it is theirs already");
        user(70_002).give(&folder).unwrap();
        let found = fs::metadata(&folder).unwrap();
        assert_eq!((found.uid(), found.mode() & 0o777), (70_002, 0o700));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        assert_eq!(fs::metadata(&other).unwrap().uid(), 0, "nothing else changes hands");
    }

    #[test]
    fn each_model_has_a_user_of_its_own_and_keeps_it() {
        let users = Users::new(100..=102);
        let all = ["a", "b", "c"].map(|model| users.of(model).unwrap());
        let mut ids = all.each_ref().map(|user| user.id);
        ids.sort_unstable();
        assert_eq!(ids, [100, 101, 102]);
        assert_eq!(users.of("b").unwrap().id, all[1].id);
        assert!(users.of("d").unwrap_err().to_string().contains("100 to 102"));
        let [a, b, c] = all;
        let was = a.id;
        drop(a);
        assert_eq!(users.of("a").unwrap().id, was);
        drop((b, c));
        assert_eq!(Users::new(100..=102).of("a").unwrap().id, Users::new(100..=102).of("a").unwrap().id);
    }
}
