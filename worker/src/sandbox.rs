//! The sandbox of a worker. A model's file may come from an untrusted source, and the code that
//! runs it is large. The worker's only thread therefore enters the sandbox before it reads the
//! file, and later threads inherit the sandbox.
//!
//! * The worker gains no privileges. A worker that runs as root keeps only the right to read all
//!   files.
//! * The worker cannot signal, trace or read other processes, start processes, or reach a network.
//! * The worker writes only to files that its work requires.
//! * Other processes of the same user cannot read the worker's memory. If the host runs out of
//!   memory, the kernel kills the worker before the supervisor.

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

use crate::boot::WorkerError;
use crate::log_line;

/// The increment that a worker adds to the `oom_score_adj` that it inherits from the supervisor, in
/// thousandths of the host's memory.
const OOM_SCORE_INCREMENT: i32 = 300;
const MAX_OOM_SCORE: i32 = 1000;

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// A restriction that the kernel did not apply, usually because the kernel does not support it.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error(
        "cannot restrict the worker with Landlock, so the worker can write files and signal processes as its user"
    )]
    Files(#[source] Cause),
    #[error("cannot filter system calls with seccomp, so the worker can make any system call")]
    Calls(#[source] Cause),
    #[error("cannot drop capabilities, so the worker keeps those of its user")]
    Capabilities(#[source] io::Error),
}

/// Prepares a new process: applies the restrictions that do not depend on the model, and changes to the
/// user, if one is given.
pub(crate) fn begin(user: Option<u32>) -> Result<(), WorkerError> {
    if let Err(error) = harden_process() {
        log_line(&format!(
            "cannot harden this process, so other processes of the same user can read its memory: {error}"
        ));
    }
    user.map_or(Ok(()), become_user).map_err(WorkerError::User)
}

/// Changes this process from root to this user. The group with the same number becomes the
/// process's only group.
fn become_user(user: u32) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
    setgroups(&[])?;
    setresgid(gid, gid, gid)?;
    Ok(setresuid(uid, uid, uid)?)
}

/// Applies the restrictions that do not depend on the model. Call this first in a new process.
pub fn harden_process() -> Result<(), io::Error> {
    // The process may have the name of an interpreter, or the number of the descriptor from which
    // it was executed. If this call fails, the process only keeps that name.
    set_name(c"shadowslice-worker").ok();
    let place = "/proc/self/oom_score_adj";
    let now: i32 = std::fs::read_to_string(place)?.trim().parse().map_err(io::Error::other)?;
    std::fs::write(place, (now + OOM_SCORE_INCREMENT).min(MAX_OOM_SCORE).to_string())?;
    // After this call, the files in `/proc/self` belong to root, so `oom_score_adj` must already be
    // written.
    Ok(set_dumpable(false)?)
}

/// Applies each restriction, and returns the restrictions that failed.
pub fn enter(writable: &[PathBuf]) -> Vec<SandboxError> {
    let files = restrict_files(writable).map_err(SandboxError::Files);
    let capabilities = drop_capabilities().map_err(SandboxError::Capabilities);
    let calls = restrict_system_calls().map_err(SandboxError::Calls);
    [files, capabilities, calls].into_iter().filter_map(Result::err).collect()
}

/// The effects of the sandbox, as measured from inside the sandbox.
#[derive(Debug, Serialize)]
pub struct SandboxReport {
    /// The restrictions that the kernel did not apply.
    pub breaches: Vec<String>,
    pub signals: bool,
    pub reads_processes: bool,
    pub starts_processes: bool,
    pub writes_files: bool,
    pub reaches_networks: bool,
    pub connects: bool,
}

/// Enters the sandbox, and then tries actions that the sandbox should prevent. The actions target
/// the process `pid`, the listening socket `socket` and the file `file`. If the sandbox does not
/// prevent the write, this function creates the file.
pub fn report(pid: i32, socket: &Path, file: &Path) -> SandboxReport {
    let begun = harden_process().err().map(|error| error.to_string());
    let mut breaches = enter(&[]);
    breaches.extend(deny_connections().err());
    let breaches = breaches.iter().map(|breach| chain(breach));
    let other = nix::unistd::Pid::from_raw(pid);
    SandboxReport {
        breaches: begun.into_iter().chain(breaches).collect(),
        signals: nix::sys::signal::kill(other, None).is_ok(),
        reads_processes: std::fs::read(format!("/proc/{pid}/environ")).is_ok(),
        starts_processes: std::process::Command::new("/bin/true").status().is_ok(),
        writes_files: std::fs::write(file, "").is_ok(),
        connects: std::os::unix::net::UnixStream::connect(socket).is_ok(),
        reaches_networks: std::net::UdpSocket::bind("127.0.0.1:0").is_ok(),
    }
}

/// Returns the folders to which a worker with this engine writes. Landlock can only permit folders
/// that exist, so this function creates the missing folders.
pub fn writable_folders(engine: &EngineSpec, on_gpu: bool) -> Vec<PathBuf> {
    let mut folders = process_folders(on_gpu);
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
    create(folders)
}

/// Returns the folders to which a shared worker writes. `engines` contains the folders of the models.
pub(crate) fn shared_folders(engines: Option<&Path>, on_gpu: bool) -> Vec<PathBuf> {
    let mut folders = process_folders(on_gpu);
    folders.extend(engines.map(Path::to_owned));
    create(folders)
}

/// Returns the folders to which every process writes.
fn process_folders(on_gpu: bool) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = ["/dev", "/proc/self"].map(PathBuf::from).to_vec();
    if on_gpu {
        // The driver stores compiled kernels in some of these folders. The others hold the sockets
        // and logs of the MPS server.
        let named = ["CUDA_CACHE_PATH", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"];
        folders.extend(named.iter().filter_map(std::env::var_os).map(PathBuf::from));
        folders.extend(std::env::home_dir().map(|home| home.join(".nv")));
    }
    folders
}

fn create(folders: Vec<PathBuf>) -> Vec<PathBuf> {
    for folder in &folders {
        // Missing parent folders are not created, because an exiting supervisor may be removing
        // them. If a folder cannot be created, the first write to it reports the reason.
        std::fs::create_dir(folder).ok();
    }
    folders
}

/// Forbids writes outside these folders. Also forbids signalling, tracing and reading processes
/// outside the sandbox, even if they belong to the same user.
fn restrict_files(writable: &[PathBuf]) -> Result<(), Cause> {
    let write = AccessFs::from_write(ABI::V3) | AccessFs::ResolveUnix;
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(write)?
        .scope(Scope::Signal)?
        .create()?
        .add_rules(path_beneath_rules(writable.iter().map(Path::new), write))?
        .restrict_self()?;
    if status.ruleset == RulesetStatus::NotEnforced {
        return Err("this kernel has no Landlock".into());
    }
    Ok(())
}

/// Drops all capabilities. A worker that runs as root keeps the right to read all files, because a
/// model's file may belong to any user.
fn drop_capabilities() -> io::Result<()> {
    set_no_new_privs()?;
    let kept = CapabilitySet::DAC_READ_SEARCH & rustix::thread::capabilities(None)?.permitted;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    Ok(set_capabilities(None, sets)?)
}

fn restrict_system_calls() -> Result<(), Cause> {
    // The error ENOSYS makes libraries fall back to `clone`, whose flags the second filter can
    // inspect.
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

/// Forbids `connect` for all threads. Call this once the device is open, because the driver is
/// connected to MPS by then. After this call, the worker cannot connect to other sockets, such as
/// those of the supervisor.
pub fn deny_connections() -> Result<(), SandboxError> {
    let denied = BTreeMap::from([(libc::SYS_connect, Vec::new())]);
    let program = program(denied, libc::EPERM).map_err(SandboxError::Calls)?;
    seccompiler::apply_filter_all_threads(&program).map_err(|error| SandboxError::Calls(error.into()))
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

/// The address families of networks. A worker uses only Unix sockets, to the supervisor and to MPS.
const NETWORKS: [i32; 4] = [libc::AF_INET, libc::AF_INET6, libc::AF_PACKET, libc::AF_VSOCK];

/// The system calls that neither an engine nor a driver needs for inference.
const DENIED: &[i64] = &[
    // These calls act on other processes.
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
    // These calls act on the host.
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
    fn cache_folders_are_created_before_the_sandbox() {
        let folder = tempfile::tempdir().unwrap();
        let [optimised, cache] = ["optimised", "engines"].map(|name| folder.path().join(name));
        let engine = EngineSpec::OnnxRuntime {
            library: PathBuf::new(),
            path: PathBuf::new(),
            threads: 1,
            providers: vec![ProviderSpec::TensorRt { cache: cache.clone() }, ProviderSpec::Cuda],
            optimised: Some(optimised.clone()),
        };
        let folders = writable_folders(&engine, false);
        for made in [optimised, cache] {
            assert!(folders.contains(&made) && made.is_dir(), "{folders:?}");
        }
    }
}
