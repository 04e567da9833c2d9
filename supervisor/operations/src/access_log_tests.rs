use std::fs;

use serde_json::Value;
use shadowslice_datapath::access::{AccessProtocol, RequestHead};
use shadowslice_datapath::peer::Peer;

use super::*;

fn ask(log: &Arc<AccessLog>, path: &str) {
    let peer = Arc::new(Peer::Unix { uid: 7, groups: Vec::new(), pid: 8 });
    let head = RequestHead { protocol: AccessProtocol::Http, method: "GET", path, request_id: None };
    let access = log.begin(head, &peer, Instant::now());
    access.set_code(200);
    access.mark_delivered();
}

fn paths(file: &Path) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap();
    let path = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        line["path"].as_str().unwrap().to_owned()
    };
    text.lines().map(path).collect()
}

#[test]
fn a_rotated_file_is_reopened_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let (file, rotated) = (folder.path().join("access.log"), folder.path().join("access.log.1"));
    let writer = AccessLogWriter::start(&file).unwrap();
    let (log, reopen) = (writer.log(), writer.reopen());
    assert_eq!(file.metadata().unwrap().mode() & 0o777, MODE);
    ask(&log, "/1");
    let until = Instant::now() + Duration::from_secs(30);
    while paths(&file).is_empty() {
        assert!(Instant::now() < until, "nothing is written");
        std::thread::yield_now();
    }
    fs::rename(&file, &rotated).unwrap();
    reopen();
    ask(&log, "/2");
    drop(log);
    writer.end();
    assert_eq!((paths(&rotated), paths(&file)), (vec!["/1".to_owned()], vec!["/2".to_owned()]));
}

#[test]
fn lines_that_cannot_be_written_are_counted() {
    let writer = AccessLogWriter::start(Path::new("/dev/full")).unwrap();
    let dropped = writer.dropped();
    ask(&writer.log(), "/1");
    ask(&writer.log(), "/2");
    writer.end();
    assert_eq!(dropped(), DroppedLines { queue_full: 0, unwritten: 2 });
}

#[test]
fn a_missing_folder_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let why = AccessLogWriter::start(&folder.path().join("no/access.log")).unwrap_err();
    assert!(why.to_string().contains("no/access.log"), "{why}");
}
