//! Workers: let in, turned away, terminated, gone.

use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use shadowslice_control::backend::{GpuBackend, GrantError, Limits, MpsGpu, MpsSetup};
use shadowslice_shared::units::Sms;

use crate::rig::{LIMITS, Rig, kill, takes_workers, until, wait, wanted};

#[test]
fn only_a_client_with_the_sms_of_its_share_is_let_in() {
    let rig = Rig::new();
    let gpu = rig.start().unwrap();
    let client = rig.client();
    assert_eq!(gpu.admit(&wanted(30), client.pid(), Sms(38)), Ok(()));
    let other = gpu.admit(&wanted(30), client.pid(), Sms(132)).unwrap_err();
    assert!(other.contains("found 132 SMs instead of 38 SMs"), "{other}");
    let outsider = i32::try_from(std::process::id()).unwrap();
    let outside = gpu.admit(&wanted(30), outsider, Sms(132)).unwrap_err();
    assert!(outside.contains("the worker runs outside MPS, with the whole GPU"), "{outside}");
    rig.order("say-get_client_list", "Server 1 not found");
    let unclear = gpu.admit(&wanted(30), client.pid(), Sms(38)).unwrap_err();
    assert!(unclear.contains("unexpected reply"), "{unclear}");
    rig.behave("say-get_client_list");
    rig.order("hang-get_client_list", "");
    let silent = gpu.admit(&wanted(30), client.pid(), Sms(38)).unwrap_err();
    assert!(silent.contains("timed out"), "{silent}");
    gpu.stop(true);
}

#[test]
fn a_clients_work_is_taken_off_the_gpu_before_it_is_killed() {
    let rig = Rig::new();
    let gpu = rig.start().unwrap();
    let client = rig.client();
    wait(gpu.terminate(client.pid()).unwrap());
    assert_eq!(rig.terminated().trim(), client.pid().to_string());
    // A worker that never became a client can be killed at once.
    wait(gpu.terminate(1).unwrap());
    assert_eq!(rig.terminated().lines().count(), 1);
    gpu.stop(true);
}

#[test]
fn a_daemon_that_hangs_delays_a_kill_for_seconds_and_no_longer() {
    let rig = Rig::new();
    let gpu = rig.start().unwrap();
    let client = rig.client();
    rig.order("hang-terminate_client", "");
    let begun = Instant::now();
    wait(gpu.terminate(client.pid()).unwrap());
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    gpu.stop(true);
}

#[test]
fn a_daemon_that_refuses_to_terminate_does_not_keep_a_worker_from_its_kill() {
    let rig = Rig::new();
    let gpu = rig.start().unwrap();
    let client = rig.client();
    rig.order("say-terminate_client", "something else\n");
    wait(gpu.terminate(client.pid()).unwrap());
    gpu.stop(true);
    wait(gpu.terminate(client.pid()).unwrap());
    wait(gpu.departed(client.pid()).unwrap());
}

#[test]
fn a_worker_has_left_when_the_server_says_so() {
    let rig = Rig::new();
    let gpu = rig.start().unwrap();
    let mut client = rig.client();
    rig.order("linger", "");
    client.kill();
    let lingering = gpu.departed(client.pid()).unwrap();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| wait(lingering));
        until("some looks", || begun.elapsed() > Duration::from_millis(300));
        assert!(!waiting.is_finished(), "it is listed still");
        rig.behave("linger");
    });
    gpu.stop(false);
    assert_eq!(rig.processes(), Vec::<i32>::new());
}

#[test]
fn a_daemon_that_dies_takes_its_workers_along_and_comes_back() {
    let rig = Rig::new();
    let gpu = rig.start().unwrap();
    let lease = gpu.enter(false).unwrap();
    let (daemon, server) = (rig.daemon(), gpu.server().unwrap().unwrap());
    kill(daemon);
    until("it is noticed", || gpu.server() != Ok(Some(server)));
    wait(gpu.lost(lease).unwrap());
    until("it is back", || takes_workers(&gpu));
    assert_ne!(rig.daemon(), daemon);
    assert!(!rig.processes().contains(&server), "the old server is ended too");
    assert_ne!(gpu.enter(false).unwrap(), lease, "those who come now are not lost");
    gpu.stop(false);
}

#[test]
fn a_server_at_fault_takes_no_workers_until_all_have_gone() {
    let rig = Rig::new();
    let gpu = rig.start().unwrap();
    let (lease, mut client, mut died) = (gpu.enter(false).unwrap(), rig.client(), rig.client());
    rig.order("fault", "");
    died.kill();
    wait(gpu.departed(died.pid()).unwrap());
    let refused = gpu.enter(false).unwrap_err();
    assert!(matches!(&refused, GrantError::Recovering(why) if why.contains("fault")), "{refused:?}");
    wait(gpu.lost(lease).unwrap());
    client.kill();
    until("it recovers", || takes_workers(&gpu));
    assert!(gpu.server().is_ok());
    gpu.stop(false);
}

#[test]
fn a_server_that_stays_at_fault_is_replaced_with_its_daemon() {
    let rig = Rig::new();
    let limits = Limits { fault: Duration::from_secs(1), ..LIMITS };
    let gpu = Arc::new(MpsGpu::start(MpsSetup { limits, ..rig.setup() }).unwrap());
    let (daemon, mut died) = (rig.daemon(), rig.client());
    rig.order("fault", "");
    rig.order("stuck", "");
    died.kill();
    wait(gpu.departed(died.pid()).unwrap());
    until("the daemon is ended", || rig.daemon_if_any() != Some(daemon));
    rig.behave("stuck");
    rig.behave("fault");
    until("it is back", || takes_workers(&gpu));
    gpu.stop(false);
}

#[test]
fn a_server_that_is_gone_is_replaced() {
    let rig = Rig::new();
    let gpu = rig.start().unwrap();
    let (lease, server) = (gpu.enter(false).unwrap(), gpu.server().unwrap().unwrap());
    let mut died = rig.client();
    kill(server);
    until("it is dead", || rig.ask("get_server_list").is_empty());
    died.kill();
    wait(gpu.departed(died.pid()).unwrap());
    wait(gpu.lost(lease).unwrap());
    until("another one is there", || matches!(gpu.server(), Ok(Some(pid)) if pid != server));
    gpu.stop(false);
}

#[test]
fn the_end_waits_behind_no_queue_for_a_daemon_that_hangs() {
    let rig = Rig::new();
    let gpu = rig.start().unwrap();
    rig.order("hang-get_server_list", "");
    let mut more_than_may_wait: Vec<_> = (1..=300).map(|pid| gpu.departed(pid).unwrap()).collect();
    let each_asks = std::future::poll_fn(|context| {
        let mut asks = more_than_may_wait.iter_mut().map(|departure| departure.as_mut().poll(context));
        assert!(asks.all(|asks| asks.is_pending()));
        Poll::Ready(())
    });
    wait(tokio::task::unconstrained(each_asks));
    let begun = Instant::now();
    gpu.stop(true);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert_eq!(rig.processes(), Vec::<i32>::new());
}
