//! Start and end.

use shadowslice::partition::{MpsError, Partition};
use shadowslice_shared::units::{Percent, Sms};

use crate::rig::{Rig, UUID, kill, until, wanted};

#[test]
fn a_daemon_and_its_server_live_as_long_as_the_gpu_is_used() {
    let rig = Rig::new();
    let gpu = rig.start().unwrap();
    let standing = gpu.standing();
    assert_eq!((standing.backend, standing.sms, standing.why), ("mps", Sms(132), None));
    assert_eq!(rig.ask("get_server_list").trim().parse().ok(), standing.mps_server_pid);
    assert_eq!(rig.processes().len(), 2, "a daemon and a server");
    gpu.stop(false);
    assert_eq!(rig.processes(), Vec::<i32>::new());
    assert!(!rig.path("mps0").try_exists().unwrap(), "its directories are removed");
}

#[test]
fn a_share_is_the_workers_own_variable_and_comes_to_sms_that_were_read_back() {
    let rig = Rig::new();
    let gpu = rig.start().unwrap();
    let sms = [1, 7, 10, 30, 50, 100].map(|percent| gpu.sms(Percent::new(percent).unwrap()).0);
    assert_eq!(sms, [8, 8, 12, 38, 66, 132]);
    let mut wanted = wanted(30);
    (wanted.priority, wanted.memory_limit) = (2, Some(4 << 30));
    let environment = gpu.environment(&wanted);
    let says = |name: &str| environment.iter().find(|(one, _)| *one == name).map(|(_, value)| value.clone());
    assert_eq!(says("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").unwrap(), "30");
    assert_eq!(says("CUDA_VISIBLE_DEVICES").unwrap(), UUID);
    assert_eq!(says("CUDA_MPS_PIPE_DIRECTORY").unwrap(), rig.pipe().display().to_string());
    assert_eq!(says("CUDA_MPS_CLIENT_PRIORITY").unwrap(), "1");
    assert_eq!(says("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT").unwrap(), format!("{UUID}=4096M"));
    assert_eq!(rig.ask("get_default_active_thread_percentage"), "100.0\n", "the server's own is untouched");
}

#[test]
fn what_cannot_be_started_says_what_to_do() {
    let rig = Rig::new();
    let mut setup = rig.setup();
    setup.program = rig.path("nowhere");
    let error = shadowslice::partition::MpsGpu::start(setup).unwrap_err();
    assert!(matches!(error, MpsError::Program { .. }), "{error:?}");
    assert!(error.to_string().contains("partition: none"), "{error}");
    rig.probing("GPU-another");
    assert!(matches!(rig.start(), Err(MpsError::OtherGpu { .. })));
    rig.script("probe", &format!("echo '{{\"sms\": 132, \"uuid\": \"{UUID}\", \"name\": \"\", \"driver\": 1, \"memory_total\": 2, \"memory_free\": 1}}'"));
    assert!(matches!(rig.start(), Err(MpsError::Outside(Sms(132)))));
    rig.script("probe", "echo 'error: no CUDA driver' >&2; exit 1");
    let error = rig.start().unwrap_err();
    assert!(shadowslice::errors::chain(&error).contains("no CUDA driver"), "{error:?}");
    assert_eq!(rig.processes(), Vec::<i32>::new(), "what was started is ended");
    assert!(!rig.path("mps0").try_exists().unwrap());
}

#[test]
fn a_daemon_that_an_earlier_supervisor_left_is_ended_first() {
    let rig = Rig::new();
    let left = std::mem::ManuallyDrop::new(rig.start().unwrap());
    let (daemon, server) = (rig.daemon(), left.standing().mps_server_pid.unwrap());
    let gpu = rig.start().unwrap();
    assert!(!rig.processes().contains(&daemon) && !rig.processes().contains(&server));
    until("its own daemon is the only one", || rig.processes().len() == 2);
    gpu.stop(false);
    kill(daemon);
}
