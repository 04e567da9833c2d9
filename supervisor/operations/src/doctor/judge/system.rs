//! The host beside its GPUs.

use std::path::Path;

use crate::doctor::check::Check;
use crate::doctor::facts::{MIB, RunDir, SystemFacts};
use crate::doctor::requirements::Requirements;

/// The size of `/dev/shm` that Docker gives a container by default, in bytes; hardly enough for
/// CUDA's own use.
const SMALL_SHARED_MEMORY: u64 = 64 * MIB;

/// Workers inherit this variable; those that name GPUs and shares are set for each worker.
const INHERITED: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// The longest pipe directory that MPS is known to take, in bytes: its sockets lie below.
const MAX_PIPE_DIRECTORY: usize = 75;

/// The longest way from the run directory to a pipe directory.
const PIPES: &str = "private/mps63/pipe";

pub(super) fn of_gpus(system: &SystemFacts) -> Vec<Check> {
    vec![environment(system), shared_memory(system), locked_memory(system)]
}

pub(super) fn of_mps(system: &SystemFacts) -> Vec<Check> {
    match &system.run_dir {
        RunDir::Usable(path) | RunDir::Taken(path) => vec![pipes(path)],
        RunDir::Unknown | RunDir::Unusable(..) => Vec::new(),
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
        Ok(_) => Check::ok(name, "work here; they need no GPU (`gpus: [{device: emulated, sms: 132}]`)"),
        Err(_) => Check::ok(name, "need no GPU, but the worker's binary"),
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
            format!("{one} is set here, and workers inherit it"),
            "unset it for `serve`: above 2, MPS takes fewer workers",
        );
    }
    if own.is_empty() {
        return Check::ok(name, "nothing that changes which GPU or share a process has");
    }
    Check::warning(
        name,
        format!("{} is set here, and `serve` does not heed it", own.join(", ")),
        "unset it, and say in the configuration which GPUs and shares models have",
    )
}

fn shared_memory(system: &SystemFacts) -> Check {
    let name = "shared memory";
    match system.shared_memory {
        None => Check::warning(
            name,
            "/dev/shm is not there, or not to be written to",
            "mount it (`mount -t tmpfs tmpfs /dev/shm`); CUDA keeps memory that processes share there",
        ),
        Some(bytes) if bytes <= SMALL_SHARED_MEMORY => Check::warning(
            name,
            format!("/dev/shm has {} MiB", bytes / MIB),
            "make it larger; in a container, `--shm-size=1g` or more",
        ),
        Some(bytes) => Check::ok(name, format!("/dev/shm has {} MiB", bytes / MIB)),
    }
}

fn locked_memory(system: &SystemFacts) -> Check {
    let limit =
        system.locked_memory.map_or("no limit".to_owned(), |bytes| format!("at most {} KiB", bytes / 1024));
    Check::ok("locked memory", limit)
}

fn pipes(run_dir: &Path) -> Check {
    let name = "mps pipe directory";
    let path = run_dir.join(PIPES);
    let length = path.as_os_str().len();
    let finding = format!("{} has {length} bytes, and {MAX_PIPE_DIRECTORY} fit", path.display());
    match length.checked_sub(MAX_PIPE_DIRECTORY) {
        None | Some(0) => Check::ok(name, finding),
        Some(more) => Check::warning(
            name,
            format!("{finding}; MPS's sockets will lie in /tmp instead"),
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
        return Check::ok(name, "shadows can start at the lowest and rise when they serve");
    }
    Check::warning(
        name,
        "a lowered one cannot be raised again (RLIMIT_NICE), so shadows start at the same as what serves",
        "set `LimitNICE=+0` in the unit, or `ulimit -e 20`",
    )
}

fn open_files(system: &SystemFacts, need: &Requirements) -> Check {
    let name = "open files";
    match system.open_files {
        Some(limit) if limit < need.descriptors => Check::warning(
            name,
            format!("at most {limit}, and {} can be wanted", need.descriptors),
            "set `LimitNOFILE=65536` in the unit, or raise the hard limit (`ulimit -Hn`)",
        ),
        Some(limit) => Check::ok(name, format!("at most {limit}")),
        None => Check::ok(name, "no limit"),
    }
}

fn run_dir(run_dir: &RunDir) -> Check {
    let name = "run_dir";
    match run_dir {
        RunDir::Usable(path) => Check::ok(name, path.display().to_string()),
        RunDir::Taken(path) => Check::ok(name, format!("a supervisor serves in {}", path.display())),
        RunDir::Unusable(path, why) => Check::fault(
            name,
            format!("{} cannot be used: {why}", path.display()),
            "choose another as run_dir, or give this user the right to write there",
        ),
        RunDir::Unknown => Check::fault(
            name,
            "neither RUNTIME_DIRECTORY nor XDG_RUNTIME_DIR is set, so there is no default",
            "say `run_dir: PATH` in the configuration",
        ),
    }
}
