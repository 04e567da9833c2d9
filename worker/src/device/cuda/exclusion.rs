//! The exclusion between recordings and the set-up of other models in the same process.
//!
//! While CUDA records a batch on one thread, some calls of other threads fail, and make the recording
//! fail: calls that wait for the whole context or create a stream, and calls of libraries that create or
//! destroy their handles (seen on an H200 with ONNX Runtime 1.31). A thread that records therefore
//! excludes the threads that make such calls. Threads that only replay recordings are not affected, nor
//! are those that sleep or wake.

use std::cell::Cell;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

static SETUP: RwLock<()> = RwLock::new(());

thread_local! {
    /// True if this thread holds the lock.
    static HOLDS: Cell<bool> = const { Cell::new(false) };
}

/// The permission of a thread to make calls that no recording tolerates, or to record.
#[derive(Debug)]
#[must_use = "the exclusion ends when this is dropped"]
pub struct Exclusion(Held);

#[derive(Debug)]
enum Held {
    /// The thread holds the lock already, in a caller.
    Outer,
    Setup {
        _guard: RwLockReadGuard<'static, ()>,
    },
    Recording {
        _guard: RwLockWriteGuard<'static, ()>,
    },
}

impl Exclusion {
    /// Waits until no other thread records.
    pub fn of_setup() -> Self {
        if HOLDS.replace(true) {
            return Self(Held::Outer);
        }
        Self(Held::Setup { _guard: SETUP.read() })
    }

    /// Waits until no other thread records or sets up a model.
    ///
    /// # Panics
    ///
    /// Panics if this thread is setting up a model, because it would wait for itself.
    pub fn of_recording() -> Self {
        assert!(!HOLDS.replace(true), "a thread must not record while it sets up a model");
        Self(Held::Recording { _guard: SETUP.write() })
    }
}

impl Drop for Exclusion {
    fn drop(&mut self) {
        if !matches!(self.0, Held::Outer) {
            HOLDS.set(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Returns whether another thread could set up a model now, and whether it could record.
    fn others_may() -> (bool, bool) {
        let may = || {
            let set_up = SETUP.try_read().is_some();
            let record = SETUP.try_write().is_some();
            (set_up, record)
        };
        thread::spawn(may).join().unwrap()
    }

    #[test]
    fn a_recording_excludes_all_other_threads_and_a_set_up_only_recordings() {
        let setup = Exclusion::of_setup();
        let inner = Exclusion::of_setup();
        assert_eq!(others_may(), (true, false));
        drop(inner);
        assert_eq!((others_may(), HOLDS.get()), ((true, false), true), "the outer set-up continues");
        drop(setup);
        assert_eq!(others_may(), (true, true));
        let recording = Exclusion::of_recording();
        drop(Exclusion::of_setup());
        assert_eq!(others_may(), (false, false));
        drop(recording);
        assert_eq!(others_may(), (true, true));
    }
}
