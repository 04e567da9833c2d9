//! Collects the facts about CUDA MPS: its programs, and the processes that run these programs.

use std::ffi::OsStr;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use super::command;
use super::processes::{ProcessTable, is_our_own, variable};
use crate::doctor::facts::{MpsControlProgram, MpsFacts, MpsKind, MpsProcess, PipeDirectory};
use shadowslice_control::backend::control_program;

const CONTROL: &str = "nvidia-cuda-mps-control";
const SERVER: &str = "nvidia-cuda-mps-server";
const PIPE_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// The default pipe directories of different versions of CUDA and of the control program.
const DEFAULT_PIPES: [&str; 2] = ["/tmp/nvidia-mps", "/run/nvidia-mps"];

pub(super) fn facts(processes: &ProcessTable) -> MpsFacts {
    let path = in_path(&control_program(), &std::env::var_os("PATH").unwrap_or_default());
    let server = path.as_ref().is_some_and(|path| path.with_file_name(SERVER).is_file());
    MpsFacts { control: path.map(control), server, foreign: foreign(processes), pipes: pipes() }
}

fn in_path(program: &Path, path: &OsStr) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return program.is_file().then(|| program.to_owned());
    }
    std::env::split_paths(path).map(|dir| dir.join(program)).find(|path| path.is_file())
}

fn control(path: PathBuf) -> MpsControlProgram {
    let output = command::output(&path, &["-v"]);
    let version = output.and_then(|output| version(&output).ok_or(output));
    MpsControlProgram { version, path }
}

/// Returns the version in the program's output, for example 13000 for `… Binary version: 13000`.
fn version(output: &str) -> Option<u32> {
    // The years in a copyright notice look like versions, so the search starts after the word
    // "version".
    let after = output.rsplit_once("ersion:").map_or(output, |(_, after)| after);
    let mut numbers = after.split(|letter: char| !letter.is_ascii_digit());
    numbers.find_map(|number| number.parse().ok().filter(|number| *number >= 1000))
}

fn foreign(processes: &ProcessTable) -> Vec<MpsProcess> {
    let kind = |name: &str| match name {
        CONTROL => Some(MpsKind::Control),
        SERVER => Some(MpsKind::Server),
        _ => None,
    };
    let foreign = processes.iter().filter(|(pid, _)| !is_our_own(**pid, processes));
    let found = foreign.filter_map(|(pid, process)| {
        let kind = kind(&process.name)?;
        Some(MpsProcess { kind, pid: *pid, uid: process.uid, pipes: variable(*pid, PIPE_VARIABLE) })
    });
    found.collect()
}

fn pipes() -> Vec<PipeDirectory> {
    let named = std::env::var_os(PIPE_VARIABLE).map(PathBuf::from);
    let places = named.into_iter().chain(DEFAULT_PIPES.map(PathBuf::from));
    let there = places.filter(|path| path.join("control").symlink_metadata().is_ok());
    there.map(|path| PipeDirectory { alive: has_listener(&path.join("control")), path }).collect()
}

/// Returns whether a process listens on the socket. Sends nothing to that process.
fn has_listener(path: &Path) -> bool {
    let tried = UnixAddr::new(path).and_then(|address| {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
        connect(socket.as_raw_fd(), &address)
    });
    // Any other failure, such as a missing permission or a full backlog, means that a process
    // listens.
    !matches!(tried, Err(Errno::ECONNREFUSED | Errno::ENOENT | Errno::ENOTSOCK))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_version_is_the_last_large_number() {
        assert_eq!(version("CUDA MPS Control for Linux/Unix/QNX. Binary version: 13000\n"), Some(13000));
        assert_eq!(version("Binary version: 12080 (r570, 64 bit)"), Some(12080));
        assert_eq!(version("no such option"), None);
    }

    #[test]
    fn a_program_is_searched_in_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = std::ffi::OsString::from(format!("/nowhere:{}", folder.path().display()));
        let program = Path::new("program");
        assert_eq!(in_path(program, &path), None);
        let there = folder.path().join(program);
        fs::write(&there, "").unwrap();
        assert_eq!(in_path(program, &path), Some(there.clone()));
        assert_eq!(in_path(&there, OsStr::new("")), Some(there));
        assert_eq!(in_path(Path::new("/nowhere/program"), &path), None);
    }

    #[test]
    fn a_socket_with_a_listener_differs_from_one_without() {
        let folder = tempfile::tempdir().unwrap();
        let listened = folder.path().join("listened");
        let listener = std::os::unix::net::UnixListener::bind(&listened).unwrap();
        assert!(has_listener(&listened), "a listener on another kind of socket counts");
        let control = folder.path().join("control");
        let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
        nix::sys::socket::bind(socket.as_raw_fd(), &UnixAddr::new(&control).unwrap()).unwrap();
        assert!(!has_listener(&control), "the socket is bound, but nobody listens");
        nix::sys::socket::listen(&socket, nix::sys::socket::Backlog::new(1).unwrap()).unwrap();
        assert!(has_listener(&control));
        drop((socket, listener));
        assert!(!has_listener(&control) && !has_listener(&folder.path().join("none")));
    }
}
