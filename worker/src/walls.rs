//! What a worker may not do once it runs a model: a model's file may come from anywhere, and the
//! code that runs it is large. The walls are raised before the file is read, by the one thread that
//! there is then, and hold for all later ones.
//!
//! * No privileges are gained, and of root's only reading of all files is left.
//! * No other process is signalled, traced or read, none is started, and no network is reached.
//! * Nothing is written but where the worker's work demands it.
//! * Others of the same user cannot read this process, and when memory is short it ends before the
//!   supervisor.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
    path_beneath_rules,
};
use nix::libc;
use nix::sys::prctl::{set_dumpable, set_name, set_no_new_privs};
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use serde::Serialize;
use shadowslice_shared::boot::{EngineSpec, ProviderSpec};
use shadowslice_shared::errors::chain;

/// Added to the supervisor's `oom_score_adj`, in thousandths of the memory.
const SOONER: i32 = 300;
const SOONEST: i32 = 1000;

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Why walls do not stand: mostly for lack of the kernel's support.
#[derive(Debug, thiserror::Error)]
pub enum Breach {
    #[error("it may write files and signal processes as its user may")]
    Files(#[source] Cause),
    #[error("it may make any system call")]
    Calls(#[source] Cause),
    #[error("it keeps the capabilities of its user")]
    Capabilities(#[source] io::Error),
}

/// For a process of root's: it has this user's rights from then on, and no group but that of the
/// same number.
pub fn become_user(user: u32) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    setgroups(&[])?;
    setresgid(gid, gid, gid)?;
    Ok(setresuid(uid, uid, uid)?)
}

/// For a process that has just begun: as much as needs no knowledge of the model.
pub fn begin() -> Result<(), io::Error> {
    // It may be an interpreter, or started by the number of an open file. Another name does no harm.
    set_name(c"shadowslice-worker").ok();
    let place = "/proc/self/oom_score_adj";
    let now: i32 = std::fs::read_to_string(place)?.trim().parse().map_err(io::Error::other)?;
    std::fs::write(place, (now + SOONER).min(SOONEST).to_string())?;
    // From here on the files in `/proc/self` are root's.
    Ok(set_dumpable(false)?)
}

/// Each wall that can be raised. Returns the others.
pub fn raise(writable: &[PathBuf]) -> Vec<Breach> {
    let files = files(writable).map_err(Breach::Files);
    let capabilities = capabilities().map_err(Breach::Capabilities);
    let calls = calls().map_err(Breach::Calls);
    [files, capabilities, calls].into_iter().filter_map(Result::err).collect()
}

/// What a worker can do behind its walls.
#[derive(Debug, Serialize)]
pub struct Found {
    /// Why walls do not stand.
    pub breaches: Vec<String>,
    pub signals: bool,
    pub reads_processes: bool,
    pub starts_processes: bool,
    pub writes_files: bool,
    pub reaches_networks: bool,
    pub connects: bool,
}

/// Raises the walls, and tries them on this process, this socket that listens, and this file, which
/// is made if it can be.
pub fn found(pid: i32, socket: &Path, file: &Path) -> Found {
    let begun = begin().err().map(|error| error.to_string());
    let mut breaches = raise(&[]);
    breaches.extend(close_connections().err());
    let breaches = breaches.iter().map(|breach| chain(breach));
    let other = nix::unistd::Pid::from_raw(pid);
    Found {
        breaches: begun.into_iter().chain(breaches).collect(),
        signals: nix::sys::signal::kill(other, None).is_ok(),
        reads_processes: std::fs::read(format!("/proc/{pid}/environ")).is_ok(),
        starts_processes: std::process::Command::new("/bin/true").status().is_ok(),
        writes_files: std::fs::write(file, "").is_ok(),
        connects: std::os::unix::net::UnixStream::connect(socket).is_ok(),
        reaches_networks: std::net::UdpSocket::bind("127.0.0.1:0").is_ok(),
    }
}

/// Where a worker with this engine writes. A folder that is not there cannot be let through, so
/// each is made.
pub fn writable(engine: &EngineSpec, on_gpu: bool) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = ["/dev", "/proc/self"].map(PathBuf::from).to_vec();
    if on_gpu {
        // The driver's cache of kernels that it compiled, and its way to the MPS server.
        let named = ["CUDA_CACHE_PATH", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"];
        folders.extend(named.iter().filter_map(std::env::var_os).map(PathBuf::from));
        folders.extend(std::env::home_dir().map(|home| home.join(".nv")));
    }
    if let EngineSpec::OnnxRuntime { optimised, providers, .. } = engine {
        folders.extend(optimised.clone());
        folders.extend(providers.iter().filter_map(|provider| match provider {
            ProviderSpec::TensorRt { cache } => Some(cache.clone()),
            ProviderSpec::Cuda => None,
        }));
    }
    if let EngineSpec::Python { cache, .. } = engine {
        folders.extend(cache.clone());
    }
    for folder in &folders {
        // Without what lies above it: a supervisor that ends removes that. What cannot be made
        // cannot be written either, which is said when it is tried.
        std::fs::create_dir(folder).ok();
    }
    folders
}

/// Nothing is written outside of these folders, and no process outside is signalled, traced or
/// read, whatever its user.
fn files(writable: &[PathBuf]) -> Result<(), Cause> {
    let write = AccessFs::from_write(ABI::V3) | AccessFs::ResolveUnix;
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(write)?
        .scope(Scope::Signal)?
        .create()?
        .add_rules(path_beneath_rules(writable.iter().map(Path::new), write))?
        .restrict_self()?;
    if status.ruleset == RulesetStatus::NotEnforced {
        return Err("the kernel has no Landlock".into());
    }
    Ok(())
}

/// Root's workers keep the right to read files, as their models' files may be any user's.
fn capabilities() -> io::Result<()> {
    set_no_new_privs()?;
    let kept = CapabilitySet::DAC_READ_SEARCH & rustix::thread::capabilities(None)?.permitted;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    Ok(set_capabilities(None, sets)?)
}

fn calls() -> Result<(), Cause> {
    // A library that is told that there is no such call takes the older one.
    install(BTreeMap::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS)?;
    let mut denied: BTreeMap<i64, Vec<SeccompRule>> = DENIED.iter().map(|&call| (call, Vec::new())).collect();
    let own = u64::from(std::process::id());
    let others = |argument| -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
        let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, own)?;
        Ok(vec![SeccompRule::new(vec![condition])?])
    };
    denied.insert(libc::SYS_kill, others(0)?);
    denied.insert(libc::SYS_tgkill, others(0)?);
    let thread = libc::CLONE_THREAD.cast_unsigned().into();
    let process = SeccompCmpOp::MaskedEq(thread);
    let process = SeccompCondition::new(0, SeccompCmpArgLen::Qword, process, 0)?;
    denied.insert(libc::SYS_clone, vec![SeccompRule::new(vec![process])?]);
    denied
        .insert(libc::SYS_socket, NETWORKS.iter().map(|&family| network(family)).collect::<Result<_, _>>()?);
    install(denied, libc::EPERM)
}

/// For all threads, once the device is open: the driver's way to MPS stands by then. Others, such as
/// the supervisor's own sockets, are out of reach.
pub fn close_connections() -> Result<(), Breach> {
    let denied = BTreeMap::from([(libc::SYS_connect, Vec::new())]);
    let program = program(denied, libc::EPERM).map_err(Breach::Calls)?;
    seccompiler::apply_filter_all_threads(&program).map_err(|error| Breach::Calls(error.into()))
}

fn network(family: i32) -> Result<SeccompRule, seccompiler::BackendError> {
    let family = u64::from(family.cast_unsigned());
    SeccompRule::new(vec![SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, family)?])
}

fn install(denied: BTreeMap<i64, Vec<SeccompRule>>, errno: i32) -> Result<(), Cause> {
    Ok(seccompiler::apply_filter(&program(denied, errno)?)?)
}

fn program(denied: BTreeMap<i64, Vec<SeccompRule>>, errno: i32) -> Result<BpfProgram, Cause> {
    let deny = SeccompAction::Errno(errno.cast_unsigned());
    let filter = SeccompFilter::new(denied, SeccompAction::Allow, deny, std::env::consts::ARCH.try_into()?)?;
    Ok(filter.try_into()?)
}

/// A worker talks by Unix sockets, to the supervisor and to MPS.
const NETWORKS: [i32; 4] = [libc::AF_INET, libc::AF_INET6, libc::AF_PACKET, libc::AF_VSOCK];

/// Calls that no engine and no driver needs for inference.
const DENIED: &[i64] = &[
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_tkill,
    libc::SYS_kcmp,
    libc::SYS_execve,
    libc::SYS_execveat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_fork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_vfork,
    // The host.
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_chroot,
    libc::SYS_delete_module,
    libc::SYS_finit_module,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_mount,
    libc::SYS_move_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pivot_root,
    libc::SYS_quotactl,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setns,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_for_kept_forms_are_made_before_the_walls_stand() {
        let folder = tempfile::tempdir().unwrap();
        let [optimised, cache] = ["optimised", "engines"].map(|name| folder.path().join(name));
        let engine = EngineSpec::OnnxRuntime {
            library: PathBuf::new(),
            path: PathBuf::new(),
            threads: 1,
            providers: vec![ProviderSpec::TensorRt { cache: cache.clone() }, ProviderSpec::Cuda],
            optimised: Some(optimised.clone()),
        };
        let folders = writable(&engine, false);
        for made in [optimised, cache] {
            assert!(folders.contains(&made) && made.is_dir(), "{folders:?}");
        }
    }
}
