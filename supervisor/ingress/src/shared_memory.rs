//! Tensors in POSIX shared memory of the client's, where `limits.shared_memory` allows it.
//!
//! A region is read and written through its descriptor and never mapped: a client may shrink it at
//! any moment, and reading a page that is gone from a mapping would end the server. So every use
//! may find less than was registered, and says so.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Component, Path};
use std::sync::Arc;

use bytes::Bytes;
use nix::fcntl::OFlag;
use parking_lot::Mutex;

use super::proto::system_shared_memory_status_response::RegionStatus;
use super::request_error::{RequestError, invalid};
use super::reserved::Reserved;
use super::tensors::Clipped;
use shadowslice_datapath::peer::{Guard, Outcome, Peer, audit};
use shadowslice_datapath::pipeline::Failure;

/// Regions at a time, over all clients; each holds a descriptor.
const MAX_REGIONS: usize = 1024;

const MAX_NAME_BYTES: usize = 1024;

const REGISTER: &str = "register shared memory";
const UNREGISTER: &str = "unregister shared memory";
/// What the log calls all regions.
const ALL: &str = "*";

const SHARED_MEMORY: &str = "/dev/shm";

#[derive(Debug)]
pub(super) struct Regions {
    guard: Guard,
    by_name: Mutex<BTreeMap<String, Arc<Region>>>,
}

#[derive(Debug)]
struct Region {
    told: RegionStatus,
    file: File,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SharedTensor {
    pub(super) region: String,
    pub(super) offset: u64,
    pub(super) byte_size: u64,
}

impl SharedTensor {
    /// `None` if the parameters name no region.
    pub(super) fn named(
        region: Option<String>,
        byte_size: Option<u64>,
        offset: Option<u64>,
    ) -> Result<Option<Self>, String> {
        match (region, byte_size) {
            (None, _) => Ok(None),
            (Some(region), Some(byte_size)) => {
                Ok(Some(Self { region, byte_size, offset: offset.unwrap_or(0) }))
            }
            (Some(_), None) => {
                Err("shared_memory_region is given without shared_memory_byte_size".to_owned())
            }
        }
    }
}

/// A place that was found to lie within its region.
#[derive(Debug, Clone)]
pub(super) struct Found {
    region: Arc<Region>,
    place: SharedTensor,
    /// From the beginning of the file.
    start: u64,
}

impl Regions {
    pub(super) fn new(guard: Guard) -> Self {
        Self { guard, by_name: Mutex::default() }
    }

    pub(super) fn allowed(&self) -> bool {
        self.guard.is_open()
    }

    fn check_allowed(&self, by: &Peer, action: &'static str, name: &str) -> Result<(), RequestError> {
        if !self.guard.is_open() {
            let why = "shared memory is not allowed here; the operator may set limits.shared_memory";
            return Err(RequestError::Unsupported(why.to_owned()));
        }
        if !self.guard.lets(by, action, name) {
            let why = "this client may not use shared memory; limits.shared_memory names who may";
            return Err(RequestError::Forbidden(why.to_owned()));
        }
        Ok(())
    }

    pub(super) fn register(&self, by: &Peer, told: RegionStatus) -> Result<(), RequestError> {
        self.check_allowed(by, REGISTER, &told.name)?;
        let name = told.name.clone();
        let outcome = self.take(told);
        let failed = outcome.as_ref().map_err(RequestError::message);
        audit(by, REGISTER, &name, (&failed).into());
        outcome
    }

    fn take(&self, told: RegionStatus) -> Result<(), RequestError> {
        let RegionStatus { name, key, offset, byte_size } = &told;
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            return invalid(format!("a region's name has 1 to {MAX_NAME_BYTES} bytes"));
        }
        let mut by_name = self.by_name.lock();
        if by_name.contains_key(name) {
            let name = Clipped(name);
            return Err(RequestError::AlreadyExists(format!(
                "shared memory region '{name}' already in manager"
            )));
        }
        if by_name.len() >= MAX_REGIONS {
            let why = format!("{MAX_REGIONS} shared memory regions are registered already; unregister some");
            return Err(Failure::Unavailable(why).into());
        }
        let file = open(key)?;
        let end = offset.checked_add(*byte_size).filter(|_| *byte_size > 0);
        if end.is_none_or(|end| file.metadata().is_ok_and(|found| end > found.len())) {
            return invalid(format!(
                "region '{}' of {byte_size} bytes from {offset} on does not lie within shared memory '{}'",
                Clipped(name),
                Clipped(key)
            ));
        }
        by_name.insert(name.clone(), Arc::new(Region { told, file }));
        Ok(())
    }

    /// An unknown region is no error. Requests under way keep the region until they end.
    pub(super) fn unregister(&self, by: &Peer, name: &str) -> Result<(), RequestError> {
        self.check_allowed(by, UNREGISTER, name)?;
        // Dropped after the lock: to close the last descriptor of a region may take long.
        let gone = self.by_name.lock().remove(name);
        drop(gone);
        audit(by, UNREGISTER, name, Outcome::Done);
        Ok(())
    }

    pub(super) fn unregister_all(&self, by: &Peer) -> Result<(), RequestError> {
        self.check_allowed(by, UNREGISTER, ALL)?;
        let gone = std::mem::take(&mut *self.by_name.lock());
        drop(gone);
        audit(by, UNREGISTER, ALL, Outcome::Done);
        Ok(())
    }

    /// All regions, by name, if the name is empty.
    pub(super) fn status(&self, by: &Peer, name: &str) -> Result<Vec<RegionStatus>, RequestError> {
        self.check_allowed(by, "look at shared memory", name)?;
        let by_name = self.by_name.lock();
        if !name.is_empty() && !by_name.contains_key(name) {
            return Err(unknown(name));
        }
        let wanted = by_name.iter().filter(|(region, _)| name.is_empty() || *region == name);
        Ok(wanted.map(|(_, region)| region.told.clone()).collect())
    }

    pub(super) fn find(&self, by: &Peer, place: &SharedTensor) -> Result<Found, RequestError> {
        self.check_allowed(by, "use shared memory", &place.region)?;
        let region = self.by_name.lock().get(&place.region).cloned().ok_or_else(|| unknown(&place.region))?;
        let end = place.offset.checked_add(place.byte_size);
        let start = region.told.offset.checked_add(place.offset);
        match (start, end.is_some_and(|end| end <= region.told.byte_size)) {
            (Some(start), true) => Ok(Found { region, place: place.clone(), start }),
            _ => invalid(format!(
                "{} bytes from {} on do not lie within shared memory region '{}' of {} bytes",
                place.byte_size,
                place.offset,
                Clipped(&place.region),
                region.told.byte_size
            )),
        }
    }
}

impl Found {
    pub(super) fn read(&self, reserved: &Reserved) -> Result<Bytes, RequestError> {
        let size = usize::try_from(self.place.byte_size).unwrap_or(usize::MAX);
        // The memory is asked for only once it is known that there is as much to read.
        self.check_length(self.place.byte_size)?;
        let mut bytes = reserved.buffer(size)?;
        bytes.resize(size, 0);
        self.region.file.read_exact_at(&mut bytes, self.start).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => self.shrunk(),
            _ => self.failed("read", &error),
        })?;
        Ok(bytes.into())
    }

    pub(super) fn write(&self, output: &str, bytes: &[u8]) -> Result<(), RequestError> {
        let needed = bytes.len() as u64;
        if needed > self.place.byte_size {
            return invalid(format!(
                "shared memory size specified with the request for output '{output}' ({} bytes) should be at least {needed} bytes",
                self.place.byte_size
            ));
        }
        // It would grow by writing past its end, which is not ours to do.
        self.check_length(needed)?;
        self.region.file.write_all_at(bytes, self.start).map_err(|error| self.failed("written", &error))
    }

    fn check_length(&self, bytes: u64) -> Result<(), RequestError> {
        let found = self.region.file.metadata().map_err(|error| self.failed("looked at", &error))?;
        let end = self.start.checked_add(bytes);
        if end.is_some_and(|end| end <= found.len()) { Ok(()) } else { Err(self.shrunk()) }
    }

    fn shrunk(&self) -> RequestError {
        let name = Clipped(&self.place.region);
        Failure::Invalid(format!("shared memory region '{name}' has become smaller than it was registered"))
            .into()
    }

    fn failed(&self, what: &str, error: &std::io::Error) -> RequestError {
        let name = Clipped(&self.place.region);
        Failure::Invalid(format!("shared memory region '{name}' cannot be {what}: {error}")).into()
    }
}

/// Opens shared memory by its key, which is a plain name with or without a slash before it.
fn open(key: &str) -> Result<File, RequestError> {
    let shown = Clipped(key);
    let name = Path::new(key.strip_prefix('/').unwrap_or(key));
    let mut parts = name.components();
    let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(only)), None) if only == name);
    if !plain || name.as_os_str() != OsStr::new(key.trim_start_matches('/')) || key.contains('\0') {
        return invalid(format!("'{shown}' is no key of shared memory: a name without slashes"));
    }
    // A name may also stand for a pipe, which must not be waited for, or for a link.
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags)
        .open(Path::new(SHARED_MEMORY).join(name));
    let file = opened.map_err(|error| {
        Failure::Invalid(format!("unable to open shared memory region '{shown}': {error}"))
    })?;
    match file.metadata() {
        Ok(found) if found.is_file() => Ok(file),
        _ => invalid(format!("'{shown}' is no shared memory")),
    }
}

fn unknown(name: &str) -> RequestError {
    RequestError::NotFound(format!("Unable to find system shared memory region: '{}'", Clipped(name)))
}

#[cfg(test)]
#[path = "shared_memory_tests.rs"]
mod tests;
