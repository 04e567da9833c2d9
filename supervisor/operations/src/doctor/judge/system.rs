//! Checks the parts of the host that do not concern its GPUs.

use std::path::Path;

use crate::doctor::check::Check;
use crate::doctor::facts::{MIB, RunDirState, SystemFacts};
use crate::doctor::requirements::Requirements;

/// The default size of `/dev/shm` in a Docker container, in bytes. This size is hardly enough for
/// CUDA itself.
const SMALL_SHARED_MEMORY: u64 = 64 * MIB;

/// The only variable for GPUs that workers inherit. The supervisor itself sets all other variables
/// that affect GPUs and shares.
const INHERITED: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// The longest path of a pipe directory that MPS is known to accept, in bytes. MPS creates its
/// sockets in this directory.
const MAX_PIPE_DIRECTORY: usize = 75;

/// The longest path of a pipe directory relative to the run directory.
const PIPES: &str = "private/mps63/pipe";

pub(super) fn of_gpus(system: &SystemFacts) -> Vec<Check> {
    vec![environment(system), shared_memory(system), locked_memory(system)]
}

pub(super) fn of_mps(system: &SystemFacts) -> Vec<Check> {
    match &system.run_dir {
        RunDirState::Usable(path) | RunDirState::Taken(path) => vec![pipes(path)],
        RunDirState::Unknown | RunDirState::Unusable(..) => Vec::new(),
    }
}

pub(super) fn checks(system: &SystemFacts, need: &Requirements) -> Vec<Check> {
    vec![
        user(system),
        priority(system),
        open_files(system, need),
        run_dir(&system.run_dir),
        Check::found("worker", &system.worker),
    ]
}

pub(super) fn emulated(system: &SystemFacts) -> Check {
    let name = "emulated devices";
    match system.worker {
        Ok(_) => Check::ok(name, "work on this host, without a GPU (`gpus: [{device: emulated, sms: 132}]`)"),
        Err(_) => Check::ok(name, "need no GPU, but the worker binary"),
    }
}

fn environment(system: &SystemFacts) -> Check {
    let name = "environment";
    let set = |inherited: bool| {
        let set = system.variables.iter().filter(move |(name, _)| (name == INHERITED) == inherited);
        set.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
    };
    let [inherited, own] = [set(true), set(false)];
    if let [one, ..] = inherited.as_slice() {
        return Check::warning(
            name,
            format!("{one} is set, and workers inherit it"),
            "unset it for `serve`: above 2, MPS accepts fewer workers",
        );
    }
    if own.is_empty() {
        return Check::ok(name, "no variable changes the GPU or the share of a process");
    }
    Check::warning(
        name,
        format!("{} is set, but `serve` ignores it", own.join(", ")),
        "unset it, and set the GPUs and shares of models in the configuration",
    )
}

fn shared_memory(system: &SystemFacts) -> Check {
    let name = "shared memory";
    match system.shared_memory {
        None => Check::warning(
            name,
            "/dev/shm is missing or not writable",
            "mount it (`mount -t tmpfs tmpfs /dev/shm`); CUDA uses it for memory that processes share",
        ),
        Some(bytes) if bytes <= SMALL_SHARED_MEMORY => Check::warning(
            name,
            format!("/dev/shm has {} MiB", bytes / MIB),
            "enlarge it; in a container, use `--shm-size=1g` or more",
        ),
        Some(bytes) => Check::ok(name, format!("/dev/shm has {} MiB", bytes / MIB)),
    }
}

fn locked_memory(system: &SystemFacts) -> Check {
    let limit =
        system.locked_memory.map_or("unlimited".to_owned(), |bytes| format!("at most {} KiB", bytes / 1024));
    Check::ok("locked memory", limit)
}

fn pipes(run_dir: &Path) -> Check {
    let name = "mps pipe directory";
    let path = run_dir.join(PIPES);
    let length = path.as_os_str().len();
    let finding = format!("{} has {length} of at most {MAX_PIPE_DIRECTORY} bytes", path.display());
    match length.checked_sub(MAX_PIPE_DIRECTORY) {
        None | Some(0) => Check::ok(name, finding),
        Some(more) => Check::warning(
            name,
            format!("{finding}; MPS uses a directory in /tmp instead"),
            format!("choose a run_dir that is {more} bytes shorter"),
        ),
    }
}

fn user(system: &SystemFacts) -> Check {
    let user = if system.uid == 0 { "root".to_owned() } else { format!("uid {}", system.uid) };
    Check::ok("user", user)
}

fn priority(system: &SystemFacts) -> Check {
    let name = "cpu priority";
    if system.may_raise_priority {
        return Check::ok(
            name,
            "shadow workers start at the lowest priority and get a normal one when they serve",
        );
    }
    Check::warning(
        name,
        "a lowered priority cannot be raised again (RLIMIT_NICE), so shadow workers start at normal priority",
        "set `LimitNICE=+0` in the unit, or run `ulimit -e 20`",
    )
}

fn open_files(system: &SystemFacts, need: &Requirements) -> Check {
    let name = "open files";
    match system.open_files {
        Some(limit) if limit < need.descriptors => Check::warning(
            name,
            format!("at most {limit}, but {} can be needed", need.descriptors),
            "set `LimitNOFILE=65536` in the unit, or raise the hard limit (`ulimit -Hn`)",
        ),
        Some(limit) => Check::ok(name, format!("at most {limit}")),
        None => Check::ok(name, "unlimited"),
    }
}

fn run_dir(run_dir: &RunDirState) -> Check {
    let name = "run_dir";
    match run_dir {
        RunDirState::Usable(path) => Check::ok(name, path.display().to_string()),
        RunDirState::Taken(path) => Check::ok(name, format!("a supervisor runs in {}", path.display())),
        RunDirState::Unusable(path, why) => Check::fault(
            name,
            format!("cannot use {}: {why}", path.display()),
            "choose another run_dir, or give this user write permission",
        ),
        RunDirState::Unknown => Check::fault(
            name,
            "no default: neither RUNTIME_DIRECTORY nor XDG_RUNTIME_DIR is set",
            "set `run_dir: PATH` in the configuration",
        ),
    }
}
