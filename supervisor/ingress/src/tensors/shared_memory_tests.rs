use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::unix::fs::symlink;

use super::*;
use crate::admission::unlimited;

const CLIENT: Peer =
    Peer::Tcp { address: SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9)), names: Vec::new() };
/// A file of shared memory, which is removed on drop.
struct Shared {
    path: std::path::PathBuf,
    key: String,
}

impl Shared {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let key = format!("shadowslice-test-{}-{name}", std::process::id());
        let path = Path::new(SHARED_MEMORY).join(&key);
        std::fs::write(&path, bytes).unwrap();
        Self { path, key }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn region(key: &str, offset: u64, byte_size: u64) -> RegionStatus {
    RegionStatus { name: "r".into(), key: key.into(), offset, byte_size }
}

fn part(offset: u64, byte_size: u64) -> SharedTensor {
    SharedTensor { region: "r".into(), offset, byte_size }
}

#[test]
fn what_is_registered_is_read_and_written_within_its_bounds() {
    let shared = Shared::new("bounds", b"0123456789");
    let regions = SharedMemory::new(Guard::everybody());
    regions.register(&CLIENT, region(&format!("/{}", shared.key), 2, 6)).unwrap();
    assert!(matches!(
        regions.register(&CLIENT, region(&shared.key, 0, 1)),
        Err(RequestError::AlreadyExists(_))
    ));
    assert_eq!(regions.find(&CLIENT, &part(0, 6)).unwrap().read(&unlimited()).unwrap(), &b"234567"[..]);
    assert_eq!(regions.find(&CLIENT, &part(5, 1)).unwrap().read(&unlimited()).unwrap(), &b"7"[..]);
    for (offset, size) in [(0, 7), (6, 1), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)] {
        assert!(regions.find(&CLIENT, &part(offset, size)).is_err(), "{offset} {size}");
    }
    let found = regions.find(&CLIENT, &part(1, 3)).unwrap();
    found.write("y", b"ab").unwrap();
    assert!(found.write("y", b"abcd").unwrap_err().to_string().contains("at least 4 bytes"));
    assert_eq!(std::fs::read(&shared.path).unwrap(), b"012ab56789");
    assert_eq!(regions.status(&CLIENT, "r").unwrap(), [region(&format!("/{}", shared.key), 2, 6)]);
    regions.unregister(&CLIENT, "r").unwrap();
    assert!(matches!(regions.find(&CLIENT, &part(0, 1)), Err(RequestError::NotFound(_))));
    assert!(matches!(regions.status(&CLIENT, "r"), Err(RequestError::NotFound(_))));
    assert_eq!(found.read(&unlimited()).unwrap(), &b"ab5"[..], "a request under way keeps it");
}

#[test]
fn memory_that_shrinks_is_refused_and_never_grown() {
    let shared = Shared::new("shrinks", &[1; 8192]);
    let regions = SharedMemory::new(Guard::everybody());
    regions.register(&CLIENT, region(&shared.key, 0, 8192)).unwrap();
    let found = regions.find(&CLIENT, &part(4000, 4000)).unwrap();
    OpenOptions::new().write(true).open(&shared.path).unwrap().set_len(4096).unwrap();
    for refused in [found.read(&unlimited()).map(drop), found.write("y", &[2; 100]).map(drop)] {
        assert!(refused.unwrap_err().to_string().contains("smaller"));
    }
    assert_eq!(std::fs::read(&shared.path).unwrap(), [1; 4096]);
}

#[test]
fn nothing_else_is_opened() {
    let regions = SharedMemory::new(Guard::everybody());
    let shared = Shared::new("else", b"1234");
    let (link, pipe, dir) = (Shared::new("link", b""), Shared::new("pipe", b""), Shared::new("dir", b""));
    std::fs::remove_file(&link.path).unwrap();
    symlink(&shared.path, &link.path).unwrap();
    std::fs::remove_file(&pipe.path).unwrap();
    nix::unistd::mkfifo(&pipe.path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::fs::remove_file(&dir.path).unwrap();
    std::fs::create_dir(&dir.path).unwrap();
    let dots = format!("../shm/{}", shared.key);
    let long = "x".repeat(300);
    for key in [
        "",
        "/",
        ".",
        "..",
        "/..",
        "../etc/passwd",
        "/etc/passwd",
        "//x",
        "a/b",
        "a/",
        "a\0b",
        "./x",
        &dots,
        &long,
        &link.key,
        &pipe.key,
        &dir.key,
        "no-such-key-here",
    ] {
        let refused = regions.register(&CLIENT, region(key, 0, 1));
        assert!(
            matches!(refused, Err(RequestError::Failed(RequestFailure::Invalid(_)))),
            "{key}: {refused:?}"
        );
    }
    for (offset, size) in [(0, 0), (0, 5), (4, 1), (u64::MAX, 2), (1, u64::MAX)] {
        assert!(regions.register(&CLIENT, region(&shared.key, offset, size)).is_err(), "{offset} {size}");
    }
    assert!(
        regions.register(&CLIENT, RegionStatus { name: String::new(), ..region(&shared.key, 0, 1) }).is_err()
    );
    assert_eq!(regions.status(&CLIENT, "").unwrap(), []);
    std::fs::remove_dir(&dir.path).unwrap();
}

#[test]
fn regions_are_bounded_in_number() {
    let shared = Shared::new("many", b"1234");
    let regions = SharedMemory::new(Guard::everybody());
    let register = |count: usize| {
        regions.register(&CLIENT, RegionStatus { name: count.to_string(), ..region(&shared.key, 0, 4) })
    };
    (0..MAX_REGIONS).for_each(|count| register(count).unwrap());
    assert!(matches!(register(MAX_REGIONS), Err(RequestError::Failed(RequestFailure::Unavailable(_)))));
    regions.unregister(&CLIENT, "").unwrap();
    register(0).unwrap();
}

#[test]
fn nothing_is_revealed_or_done_without_permission() {
    let regions = SharedMemory::new(Guard::nobody());
    let refused = [
        regions.register(&CLIENT, region("x", 0, 1)).map(drop),
        regions.unregister(&CLIENT, "x"),
        regions.unregister(&CLIENT, ""),
        regions.status(&CLIENT, "").map(drop),
        regions.find(&CLIENT, &part(0, 1)).map(drop),
    ];
    for refused in refused {
        assert!(
            matches!(&refused, Err(RequestError::Unsupported(why)) if why.contains("limits.shared_memory"))
        );
    }
}

#[test]
fn a_client_can_only_use_files_that_permit_it() {
    let client = |uid, groups: &[u32]| Peer::Unix { uid, groups: groups.to_vec(), pid: 1 };
    let file = |user, mode: u32| FileAccess { user, group: 70_010, mode: 0o100_000 | mode };
    let own = file(70_001, 0o600);
    assert!(own.permits(&client(70_001, &[])) && own.permits(&client(0, &[])));
    assert!(!own.permits(&client(70_002, &[70_010])) && !own.permits(&CLIENT));
    assert!(!file(70_001, 0o466).permits(&client(70_001, &[70_010])), "its own bits count");
    assert!(!file(70_001, 0o646).permits(&client(70_002, &[70_010])), "and so do its group's");
    assert!(file(70_001, 0o660).permits(&client(70_002, &[5, 70_010])));
    assert!(file(70_001, 0o606).permits(&client(70_002, &[])) && file(70_001, 0o606).permits(&CLIENT));
    assert!(file(geteuid().as_raw(), 0o600).permits(&CLIENT), "the file belongs to the server's own user");

    let shared = Shared::new("foreign", b"0123");
    let regions = SharedMemory::new(Guard::everybody());
    let stranger = client(70_001, &[]);
    std::fs::set_permissions(&shared.path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let refused = |outcome: Result<(), RequestError>| matches!(outcome, Err(RequestError::Forbidden(_)));
    assert!(refused(regions.register(&stranger, region(&shared.key, 0, 4))));
    regions.register(&CLIENT, region(&shared.key, 0, 4)).unwrap();
    assert!(refused(regions.find(&stranger, &part(0, 4)).map(|_| ())));
    assert!(refused(regions.unregister(&stranger, "r")));
    assert_eq!(regions.status(&stranger, "").unwrap(), []);
    regions.unregister(&stranger, "").unwrap();
    assert_eq!(regions.status(&CLIENT, "").unwrap().len(), 1);
}
