use super::*;

fn unix(path: &Path, mode: Option<u32>, group: Option<&str>) -> Listener {
    Listener::Unix { path: path.to_owned(), mode, group: group.map(str::to_owned), peers: None }
}

async fn bind_here(listener: &Listener) -> Result<BoundListener, BindError> {
    bind(Protocol { name: "test", alpn: b"" }, listener, &mut Inherited::default(), &Arc::default()).await
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o7777
}

#[tokio::test]
async fn a_socket_has_its_mode_and_goes_when_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.sock");
    let bound = bind_here(&unix(&path, None, None)).await.unwrap();
    assert_eq!(mode(&path), 0o660);
    UnixStream::connect(&path).await.unwrap();
    drop(bound);
    assert!(!path.try_exists().unwrap());
    let _bound = bind_here(&unix(&path, Some(0o606), None)).await.unwrap();
    assert_eq!(mode(&path), 0o606);
}

#[tokio::test]
async fn a_socket_in_use_is_left_alone_and_a_stale_one_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.sock");
    let live = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let refused = bind_here(&unix(&path, None, None)).await.unwrap_err();
    assert!(refused.to_string().starts_with("another process listens on"), "{refused}");
    assert!(path.try_exists().unwrap());
    drop(live);
    bind_here(&unix(&path, None, None)).await.unwrap();
}

#[tokio::test]
async fn a_file_that_is_not_a_socket_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.sock");
    std::fs::write(&path, "precious").unwrap();
    let refused = bind_here(&unix(&path, None, None)).await.unwrap_err();
    assert!(refused.to_string().contains("exists and is not a socket"), "{refused}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[tokio::test]
async fn a_socket_that_was_replaced_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.sock");
    let bound = bind_here(&unix(&path, None, None)).await.unwrap();
    // The old inode stays in use, so that the new file cannot get its number.
    std::fs::rename(&path, dir.path().join("old.sock")).unwrap();
    let _other = std::os::unix::net::UnixListener::bind(&path).unwrap();
    drop(bound);
    assert!(path.try_exists().unwrap());
}

#[tokio::test]
async fn faults_name_the_address() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.sock");
    let unknown = bind_here(&unix(&path, None, Some("no such group"))).await.unwrap_err();
    assert!(unknown.to_string().contains("the group \"no such group\""), "{unknown}");
    assert!(!path.try_exists().unwrap());
    let nowhere = bind_here(&unix(&dir.path().join("no/x.sock"), None, None)).await.unwrap_err();
    assert!(nowhere.to_string().contains("no/x.sock"));
    let long = bind_here(&unix(&dir.path().join("x".repeat(200)), None, None)).await.unwrap_err();
    assert!(long.to_string().starts_with("cannot listen on"), "{long}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let taken_twice = std::net::TcpListener::bind(taken);
    let listener = Listener::Tcp { address: taken, tls: None, tokens: None };
    assert_eq!(bind_here(&listener).await.is_err(), taken_twice.is_ok());
}
