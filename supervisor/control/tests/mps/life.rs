//! Start and end.

use std::time::{Duration, Instant};

use shadowslice_control::backend::{BackendKind, GpuBackend, MpsError};
use shadowslice_shared::units::{Percent, Sms};

use crate::rig::{Rig, UUID, wanted};

#[test]
fn a_daemon_and_its_server_live_as_long_as_the_gpu_is_used() {
    let rig = Rig::new();
    let gpu = rig.start().unwrap();
    assert_eq!((gpu.facts().kind, gpu.facts().sms), (BackendKind::Mps, Sms(132)));
    assert_eq!(rig.ask("get_server_list").trim().parse().ok(), gpu.server().unwrap());
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
    let error = shadowslice_control::backend::MpsGpu::start(setup).unwrap_err();
    assert!(matches!(error, MpsError::Program { .. }), "{error:?}");
    assert!(error.to_string().contains("partition: none"), "{error}");
    rig.probing("GPU-another");
    assert!(matches!(rig.start(), Err(MpsError::OtherGpu { .. })));
    rig.script("probe", &format!("echo '{{\"sms\": 132, \"uuid\": \"{UUID}\", \"name\": \"\", \"driver\": 1, \"memory_total\": 2, \"memory_free\": 1}}'"));
    assert!(matches!(rig.start(), Err(MpsError::Outside(Sms(132)))));
    rig.script("probe", "echo 'error: no CUDA driver' >&2; exit 1");
    let error = rig.start().unwrap_err();
    assert!(shadowslice_shared::errors::chain(&error).contains("no CUDA driver"), "{error:?}");
    assert_eq!(rig.processes(), Vec::<i32>::new(), "what was started is ended");
    assert!(!rig.path("mps0").try_exists().unwrap());
}

#[test]
fn a_daemon_that_an_earlier_supervisor_left_is_ended_first() {
    for hangs in [false, true] {
        let rig = Rig::new();
        let mut left = rig.leave_daemon(&rig.pipe());
        let of_the_dead = rig.processes();
        assert_eq!(of_the_dead.len(), 2);
        if hangs {
            rig.order("hang-quit", "");
        }
        let gpu = rig.start().unwrap();
        left.0.wait().unwrap();
        assert!(rig.processes().iter().all(|pid| !of_the_dead.contains(pid)));
        gpu.stop(true);
        assert_eq!(rig.processes(), Vec::<i32>::new());
    }
}

#[test]
fn a_slow_server_is_waited_for_and_a_dead_one_not_for_ever() {
    let rig = Rig::new();
    rig.order("slow-get_server_list", "300");
    rig.start().unwrap().stop(true);
    rig.behave("slow-get_server_list");
    for order in ["initializing", "hang-get_server_list", "hang-start_server", "hang-get_server_status"] {
        rig.order(order, "");
        let begun = Instant::now();
        assert!(matches!(rig.start(), Err(MpsError::Start { .. })), "{order}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{order}");
        rig.behave(order);
    }
    assert_eq!(rig.processes(), Vec::<i32>::new());
    assert!(!rig.path("mps0").try_exists().unwrap());
}

#[test]
fn what_a_daemon_says_before_it_dies_is_told() {
    let rig = Rig::new();
    rig.script(
        "control",
        "if [ \"$1\" = -f ]; then echo 'no such GPU' > $CUDA_MPS_LOG_DIRECTORY/control.log; exit 3; fi",
    );
    let error = rig.start().unwrap_err();
    assert!(
        matches!(&error, MpsError::Start { why, log } if why.contains("exit status: 3") && log.contains("no such GPU")),
        "{error:?}"
    );
}

#[test]
fn a_daemon_that_does_not_quit_is_killed() {
    for order in ["hang-quit", "linger"] {
        let rig = Rig::new();
        let gpu = rig.start().unwrap();
        // A client that stays in the list keeps the daemon from quitting.
        let mut client = rig.client();
        rig.order(order, "");
        client.kill();
        gpu.stop(false);
        assert_eq!(rig.processes(), Vec::<i32>::new(), "{order}");
        assert!(!rig.path("mps0").try_exists().unwrap(), "{order}");
    }
}
