//! Tensors in the clients' POSIX shared memory, if `limits.shared_memory` allows it.
//!
//! The server reads and writes a region through its descriptor and never maps it. A client may
//! shrink the region at any time, and reading a page that is gone from a mapping would end the
//! server. So a request can find less memory than was registered, and then fails.
//!
//! The server may open files that its clients may not. So a client can only use regions whose files
//! the client itself may read and write.

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

use crate::admission::{Clipped, MemoryPermit, RequestError, invalid};
use crate::proto::system_shared_memory_status_response::RegionStatus;
use shadowslice_datapath::peer::{AuditOutcome, Guard, Peer, audit};
use shadowslice_datapath::pipeline::RequestFailure;

/// The maximum number of regions of all clients. Each region holds a descriptor.
const MAX_REGIONS: usize = 1024;

const MAX_NAME_BYTES: usize = 1024;

const REGISTER: &str = "register shared memory";
const UNREGISTER: &str = "unregister shared memory";
/// The name of all regions in the log.
const ALL: &str = "*";

const SHARED_MEMORY: &str = "/dev/shm";

/// The name, key, offset and size of a region. The offset and the size are in bytes.
pub type Region = (String, String, u64, u64);

/// The regions that clients have registered.
#[derive(Debug)]
pub struct SharedMemory {
    guard: Guard,
    by_name: Mutex<BTreeMap<String, Arc<RegisteredRegion>>>,
}

#[derive(Debug)]
struct RegisteredRegion {
    status: RegionStatus,
    file: File,
    access: FileAccess,
}

/// The owner and the mode of a file, which decide who may read and write it.
#[derive(Debug)]
struct FileAccess {
    user: u32,
    group: u32,
    mode: u32,
}

impl FileAccess {
    fn of(file: &Metadata) -> Self {
        Self { user: file.uid(), group: file.gid(), mode: file.mode() }
    }

    /// Returns whether a peer may read and write the file. A peer over TCP may be any user of the
    /// host. It may use files of the server's user, because it mostly is this user.
    fn permits(&self, peer: &Peer) -> bool {
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

/// A part of a region that contains a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SharedTensor {
    pub(crate) region: String,
    pub(crate) offset: u64,
    pub(crate) byte_size: u64,
}

/// A part of a region that has been checked to be inside the region.
#[derive(Debug, Clone)]
pub(crate) struct RegionSlice {
    region: Arc<RegisteredRegion>,
    part: SharedTensor,
    /// The offset in the file, in bytes.
    start: u64,
}

impl SharedMemory {
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

    pub(crate) fn register(&self, by: &Peer, region: RegionStatus) -> Result<(), RequestError> {
        self.check_allowed(by, REGISTER, &region.name)?;
        let name = region.name.clone();
        let outcome = self.insert(Some(by), region);
        let failed = outcome.as_ref().map_err(RequestError::message);
        audit(by, REGISTER, &name, (&failed).into());
        outcome
    }

    /// Returns all regions, in the form in which a supervisor passes them to the next one.
    pub fn regions(&self) -> Vec<Region> {
        let all = self.by_name.lock();
        let status = all.values().map(|region| region.status.clone());
        status.map(|status| (status.name, status.key, status.offset, status.byte_size)).collect()
    }

    /// Registers the regions of the previous supervisor. Omits regions whose files are gone.
    pub fn take_over(&self, regions: Vec<Region>) {
        for (name, key, offset, byte_size) in regions {
            let status = RegionStatus { name: name.clone(), key, offset, byte_size };
            if let Err(why) = self.insert(None, status) {
                tracing::warn!(
                    region = name,
                    why = why.message(),
                    "cannot take over a shared memory region from the previous supervisor; its clients must register the region again"
                );
            }
        }
    }

    fn insert(&self, by: Option<&Peer>, status: RegionStatus) -> Result<(), RequestError> {
        let RegionStatus { name, key, offset, byte_size } = &status;
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
        let access = FileAccess::of(&found);
        if by.is_some_and(|by| !access.permits(by)) {
            return Err(forbidden(name));
        }
        let end = offset.checked_add(*byte_size).filter(|_| *byte_size > 0);
        if end.is_none_or(|end| end > found.len()) {
            return invalid(format!(
                "region '{}' of {byte_size} bytes at offset {offset} exceeds shared memory '{}'",
                Clipped(name),
                Clipped(key)
            ));
        }
        by_name.insert(name.clone(), Arc::new(RegisteredRegion { status, file, access }));
        Ok(())
    }

    /// Removes a region, if it exists, or all regions that the client may use if the name is empty.
    /// Requests in flight keep their regions until they end.
    pub(crate) fn unregister(&self, by: &Peer, name: &str) -> Result<(), RequestError> {
        let shown = if name.is_empty() { ALL } else { name };
        self.check_allowed(by, UNREGISTER, shown)?;
        let mut by_name = self.by_name.lock();
        let is_foreign = by_name.get(name).is_some_and(|region| !region.access.permits(by));
        let is_named = |key: &str, region: &RegisteredRegion| match name {
            "" => region.access.permits(by),
            name => key == name,
        };
        let gone: Vec<_> =
            by_name.extract_if(.., |key, region| !is_foreign && is_named(key, region)).collect();
        // The regions are dropped without the lock, because closing their last descriptors may take
        // long.
        drop(by_name);
        drop(gone);
        if is_foreign {
            return Err(forbidden(name));
        }
        audit(by, UNREGISTER, shown, AuditOutcome::Done);
        Ok(())
    }

    /// Returns a region, or all regions that the client may use if the name is empty.
    pub(crate) fn status(&self, by: &Peer, name: &str) -> Result<Vec<RegionStatus>, RequestError> {
        self.check_allowed(by, "look at shared memory", name)?;
        let by_name = self.by_name.lock();
        let named = by_name.values().filter(|region| name.is_empty() || region.status.name == name);
        let found: Vec<_> =
            named.filter(|region| region.access.permits(by)).map(|region| region.status.clone()).collect();
        if found.is_empty() && !name.is_empty() { Err(unknown(name)) } else { Ok(found) }
    }

    /// Returns a part of a region for a request.
    pub(crate) fn find(&self, by: &Peer, part: &SharedTensor) -> Result<RegionSlice, RequestError> {
        self.check_allowed(by, "use shared memory", &part.region)?;
        let region = self.by_name.lock().get(&part.region).cloned().ok_or_else(|| unknown(&part.region))?;
        if !region.access.permits(by) {
            return Err(forbidden(&part.region));
        }
        let end = part.offset.checked_add(part.byte_size);
        let start = region.status.offset.checked_add(part.offset);
        match (start, end.is_some_and(|end| end <= region.status.byte_size)) {
            (Some(start), true) => Ok(RegionSlice { region, part: part.clone(), start }),
            _ => invalid(format!(
                "{} bytes at offset {} exceed shared memory region '{}' of {} bytes",
                part.byte_size,
                part.offset,
                Clipped(&part.region),
                region.status.byte_size
            )),
        }
    }
}

impl RegionSlice {
    pub(crate) fn read(&self, permit: &MemoryPermit) -> Result<Bytes, RequestError> {
        let size = usize::try_from(self.part.byte_size).unwrap_or(usize::MAX);
        // The buffer is allocated only if the region has that many bytes.
        self.check_length(self.part.byte_size)?;
        let mut bytes = permit.buffer(size)?;
        bytes.resize(size, 0);
        self.region.file.read_exact_at(&mut bytes, self.start).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => self.shrunk(),
            _ => self.failed("read", &error),
        })?;
        Ok(bytes.into())
    }

    pub(crate) fn write(&self, output: &str, bytes: &[u8]) -> Result<(), RequestError> {
        let needed = bytes.len() as u64;
        if needed > self.part.byte_size {
            return invalid(format!(
                "shared memory size specified with the request for output '{output}' ({} bytes) should be at least {needed} bytes",
                self.part.byte_size
            ));
        }
        // A write past the end would enlarge the file, which belongs to the client.
        self.check_length(needed)?;
        self.region.file.write_all_at(bytes, self.start).map_err(|error| self.failed("written", &error))
    }

    fn check_length(&self, bytes: u64) -> Result<(), RequestError> {
        let found = self.region.file.metadata().map_err(|error| self.failed("examined", &error))?;
        let end = self.start.checked_add(bytes);
        if end.is_some_and(|end| end <= found.len()) { Ok(()) } else { Err(self.shrunk()) }
    }

    fn shrunk(&self) -> RequestError {
        let name = Clipped(&self.part.region);
        RequestFailure::Invalid(format!(
            "shared memory region '{name}' is now smaller than when it was registered"
        ))
        .into()
    }

    fn failed(&self, what: &str, error: &std::io::Error) -> RequestError {
        let name = Clipped(&self.part.region);
        RequestFailure::Invalid(format!("shared memory region '{name}' cannot be {what}: {error}")).into()
    }
}

/// Opens shared memory by its key, which is a plain name after an optional slash.
fn open(key: &str) -> Result<(File, Metadata), RequestError> {
    let shown = Clipped(key);
    let name = Path::new(key.strip_prefix('/').unwrap_or(key));
    let mut parts = name.components();
    let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(only)), None) if only == name);
    if !plain || name.as_os_str() != OsStr::new(key.trim_start_matches('/')) || key.contains('\0') {
        return invalid(format!("'{shown}' is not a shared memory key; use a name without slashes"));
    }
    // The name may belong to a pipe, on which the open must not block, or to a link.
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

fn forbidden(name: &str) -> RequestError {
    let why = "this client may not read and write the region's file";
    RequestError::Forbidden(format!("shared memory region '{}': {why}", Clipped(name)))
}

fn unknown(name: &str) -> RequestError {
    RequestError::NotFound(format!("Unable to find system shared memory region: '{}'", Clipped(name)))
}

#[cfg(test)]
#[path = "shared_memory_tests.rs"]
mod tests;
