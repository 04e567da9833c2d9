//! Tensors in POSIX shared memory of the client's, where `limits.shared_memory` allows it.
//!
//! A region is read and written through its descriptor and never mapped: a client may shrink it at
//! any moment, and reading a page that is gone from a mapping would end the server. So every use
//! may find less than was registered, and says so.
//!
//! The server may open files that its clients may not. So a client has to do only with regions
//! whose files let it read and write by itself.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path};
use std::sync::Arc;

use bytes::Bytes;
use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use parking_lot::Mutex;

use crate::admission::memory_permit::Reserved;
use crate::admission::request_error::{RequestError, invalid};
use crate::proto::system_shared_memory_status_response::RegionStatus;
use crate::tensors::check::Clipped;
use shadowslice_datapath::peer::{AuditOutcome, Guard, Peer, audit};
use shadowslice_datapath::pipeline::RequestFailure;

/// Regions at a time, over all clients; each holds a descriptor.
const MAX_REGIONS: usize = 1024;

const MAX_NAME_BYTES: usize = 1024;

const REGISTER: &str = "register shared memory";
const UNREGISTER: &str = "unregister shared memory";
/// What the log calls all regions.
const ALL: &str = "*";

const SHARED_MEMORY: &str = "/dev/shm";

#[derive(Debug)]
pub(crate) struct Regions {
    guard: Guard,
    by_name: Mutex<BTreeMap<String, Arc<Region>>>,
}

#[derive(Debug)]
struct Region {
    told: RegionStatus,
    file: File,
    lets: Lets,
}

/// Whom a file lets read and write it.
#[derive(Debug)]
struct Lets {
    user: u32,
    group: u32,
    mode: u32,
}

impl Lets {
    fn of(file: &Metadata) -> Self {
        Self { user: file.uid(), group: file.gid(), mode: file.mode() }
    }

    /// Over TCP it may be any user of the host. Files of this server's own user are open to them,
    /// as there it is mostly this user that asks.
    fn lets(&self, peer: &Peer) -> bool {
        let has = |bits| self.mode & bits == bits;
        match peer {
            Peer::Tcp { .. } => self.user == geteuid().as_raw() || has(0o006),
            Peer::Unix { uid: 0, .. } => true,
            Peer::Unix { uid, .. } if *uid == self.user => has(0o600),
            Peer::Unix { groups, .. } if groups.contains(&self.group) => has(0o060),
            Peer::Unix { .. } => has(0o006),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SharedTensor {
    pub(crate) region: String,
    pub(crate) offset: u64,
    pub(crate) byte_size: u64,
}

impl SharedTensor {
    /// `None` if the parameters name no region.
    pub(crate) fn named(
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
pub(crate) struct Found {
    region: Arc<Region>,
    place: SharedTensor,
    /// From the beginning of the file.
    start: u64,
}

impl Regions {
    pub(crate) fn new(guard: Guard) -> Self {
        Self { guard, by_name: Mutex::default() }
    }

    pub(crate) fn allowed(&self) -> bool {
        self.guard.permits_any()
    }

    fn check_allowed(&self, by: &Peer, action: &'static str, name: &str) -> Result<(), RequestError> {
        if !self.guard.permits_any() {
            let why =
                "shared memory is not allowed; to allow it, set limits.shared_memory in the configuration";
            return Err(RequestError::Unsupported(why.to_owned()));
        }
        if !self.guard.permits(by, action, name) {
            let why =
                "this client may not use shared memory; limits.shared_memory lists the clients that may";
            return Err(RequestError::Forbidden(why.to_owned()));
        }
        Ok(())
    }

    pub(crate) fn register(&self, by: &Peer, told: RegionStatus) -> Result<(), RequestError> {
        self.check_allowed(by, REGISTER, &told.name)?;
        let name = told.name.clone();
        let outcome = self.take(Some(by), told);
        let failed = outcome.as_ref().map_err(RequestError::message);
        audit(by, REGISTER, &name, (&failed).into());
        outcome
    }

    /// As they may be registered anew.
    pub(crate) fn told(&self) -> Vec<RegionStatus> {
        self.by_name.lock().values().map(|region| region.told.clone()).collect()
    }

    /// What another supervisor let its clients register; a region whose file is gone is left out.
    pub(crate) fn take_over(&self, told: Vec<RegionStatus>) {
        for region in told {
            let name = region.name.clone();
            if let Err(why) = self.take(None, region) {
                tracing::warn!(
                    region = name,
                    why = why.message(),
                    "cannot take over a shared memory region from the previous supervisor; its clients must register the region again"
                );
            }
        }
    }

    fn take(&self, by: Option<&Peer>, told: RegionStatus) -> Result<(), RequestError> {
        let RegionStatus { name, key, offset, byte_size } = &told;
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            return invalid(format!("a region's name must have 1 to {MAX_NAME_BYTES} bytes"));
        }
        let mut by_name = self.by_name.lock();
        if by_name.contains_key(name) {
            let name = Clipped(name);
            return Err(RequestError::AlreadyExists(format!(
                "shared memory region '{name}' already in manager"
            )));
        }
        if by_name.len() >= MAX_REGIONS {
            let why = format!("{MAX_REGIONS} shared memory regions are already registered; unregister some");
            return Err(RequestFailure::Unavailable(why).into());
        }
        let (file, found) = open(key)?;
        let lets = Lets::of(&found);
        if by.is_some_and(|by| !lets.lets(by)) {
            return Err(foreign(name));
        }
        let end = offset.checked_add(*byte_size).filter(|_| *byte_size > 0);
        if end.is_none_or(|end| end > found.len()) {
            return invalid(format!(
                "region '{}' of {byte_size} bytes at offset {offset} exceeds shared memory '{}'",
                Clipped(name),
                Clipped(key)
            ));
        }
        by_name.insert(name.clone(), Arc::new(Region { told, file, lets }));
        Ok(())
    }

    /// An unknown region is no error. Requests under way keep the region until they end.
    pub(crate) fn unregister(&self, by: &Peer, name: &str) -> Result<(), RequestError> {
        self.check_allowed(by, UNREGISTER, name)?;
        let gone = {
            let mut by_name = self.by_name.lock();
            if by_name.get(name).is_some_and(|region| !region.lets.lets(by)) {
                return Err(foreign(name));
            }
            by_name.remove(name)
        };
        // Here, as to close the last descriptor of a region may take long.
        drop(gone);
        audit(by, UNREGISTER, name, AuditOutcome::Done);
        Ok(())
    }

    /// Those of the client's own.
    pub(crate) fn unregister_all(&self, by: &Peer) -> Result<(), RequestError> {
        self.check_allowed(by, UNREGISTER, ALL)?;
        let gone: Vec<_> = self.by_name.lock().extract_if(.., |_, region| region.lets.lets(by)).collect();
        drop(gone);
        audit(by, UNREGISTER, ALL, AuditOutcome::Done);
        Ok(())
    }

    /// All regions of the client's own, by name, if the name is empty.
    pub(crate) fn status(&self, by: &Peer, name: &str) -> Result<Vec<RegionStatus>, RequestError> {
        self.check_allowed(by, "look at shared memory", name)?;
        let by_name = self.by_name.lock();
        let wanted = by_name.values().filter(|region| name.is_empty() || region.told.name == name);
        let told: Vec<_> =
            wanted.filter(|region| region.lets.lets(by)).map(|region| region.told.clone()).collect();
        if told.is_empty() && !name.is_empty() { Err(unknown(name)) } else { Ok(told) }
    }

    pub(crate) fn find(&self, by: &Peer, place: &SharedTensor) -> Result<Found, RequestError> {
        self.check_allowed(by, "use shared memory", &place.region)?;
        let region = self.by_name.lock().get(&place.region).cloned().ok_or_else(|| unknown(&place.region))?;
        if !region.lets.lets(by) {
            return Err(foreign(&place.region));
        }
        let end = place.offset.checked_add(place.byte_size);
        let start = region.told.offset.checked_add(place.offset);
        match (start, end.is_some_and(|end| end <= region.told.byte_size)) {
            (Some(start), true) => Ok(Found { region, place: place.clone(), start }),
            _ => invalid(format!(
                "{} bytes at offset {} exceed shared memory region '{}' of {} bytes",
                place.byte_size,
                place.offset,
                Clipped(&place.region),
                region.told.byte_size
            )),
        }
    }
}

impl Found {
    pub(crate) fn read(&self, reserved: &Reserved) -> Result<Bytes, RequestError> {
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

    pub(crate) fn write(&self, output: &str, bytes: &[u8]) -> Result<(), RequestError> {
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
        let found = self.region.file.metadata().map_err(|error| self.failed("examined", &error))?;
        let end = self.start.checked_add(bytes);
        if end.is_some_and(|end| end <= found.len()) { Ok(()) } else { Err(self.shrunk()) }
    }

    fn shrunk(&self) -> RequestError {
        let name = Clipped(&self.place.region);
        RequestFailure::Invalid(format!(
            "shared memory region '{name}' is now smaller than when it was registered"
        ))
        .into()
    }

    fn failed(&self, what: &str, error: &std::io::Error) -> RequestError {
        let name = Clipped(&self.place.region);
        RequestFailure::Invalid(format!("shared memory region '{name}' cannot be {what}: {error}")).into()
    }
}

/// Opens shared memory by its key, which is a plain name with or without a slash before it.
fn open(key: &str) -> Result<(File, Metadata), RequestError> {
    let shown = Clipped(key);
    let name = Path::new(key.strip_prefix('/').unwrap_or(key));
    let mut parts = name.components();
    let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(only)), None) if only == name);
    if !plain || name.as_os_str() != OsStr::new(key.trim_start_matches('/')) || key.contains('\0') {
        return invalid(format!("'{shown}' is not a shared memory key; use a name without slashes"));
    }
    // A name may also stand for a pipe, which must not be waited for, or for a link.
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags)
        .open(Path::new(SHARED_MEMORY).join(name));
    let file = opened.map_err(|error| {
        RequestFailure::Invalid(format!("unable to open shared memory region '{shown}': {error}"))
    })?;
    match file.metadata() {
        Ok(found) if found.is_file() => Ok((file, found)),
        _ => invalid(format!("'{shown}' is not shared memory")),
    }
}

fn foreign(name: &str) -> RequestError {
    let why = "this client may not read and write the region's file";
    RequestError::Forbidden(format!("shared memory region '{}': {why}", Clipped(name)))
}

fn unknown(name: &str) -> RequestError {
    RequestError::NotFound(format!("Unable to find system shared memory region: '{}'", Clipped(name)))
}

#[cfg(test)]
#[path = "shared_memory_tests.rs"]
mod tests;
