use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nvml_wrapper::error::NvmlError;
use parking_lot::Mutex;
use shadowslice_shared::units::Sms;

use super::facts::each_once;
use super::*;
use shadowslice_config as config;
use shadowslice_config::CudaDevice;

const MIB: u64 = 1 << 20;

/// Two H200s. A test can remove the second one.
#[derive(Default)]
struct Board {
    second_is_lost: AtomicBool,
    xids: Mutex<VecDeque<Result<XidEvent, NvmlFault>>>,
}

struct BoardXids<'a>(&'a Board);

fn uuid(index: u32) -> String {
    format!("GPU-{index}a2b3c4d-0000")
}

fn fault() -> NvmlFault {
    NvmlFault::Ask { what: "anything", source: NvmlError::GpuLost }
}

impl Driver for Board {
    fn identities(&self) -> Result<Vec<Identity>, NvmlFault> {
        let gpu = |index| Identity { index, uuid: uuid(index), name: "NVIDIA H200".to_owned() };
        Ok((0..2).map(gpu).collect())
    }

    fn usage(&self, of: &str) -> Result<Usage, NvmlFault> {
        if of == uuid(1) && self.second_is_lost.load(Ordering::Relaxed) {
            return Err(fault());
        }
        Ok(Usage {
            memory: Memory { used: 3 * MIB, free: 5 * MIB, total: 9 * MIB },
            utilisation_percent: Some(40),
            power: Power::default(),
            processes: vec![GpuProcess { pid: 77, bytes: Some(MIB) }],
        })
    }

    fn xids<'a>(&'a self, _: &[String]) -> Result<Box<dyn Xids + 'a>, NvmlFault> {
        Ok(Box::new(BoardXids(self)))
    }
}

impl Xids for BoardXids<'_> {
    fn wait(&mut self, at_most: Duration) -> Result<Option<XidEvent>, NvmlFault> {
        let next = self.0.xids.lock().pop_front();
        let Some(next) = next else {
            std::thread::park_timeout(at_most.min(Duration::from_millis(5)));
            return Ok(None);
        };
        next.map(Some)
    }
}

fn cuda(device: CudaDevice) -> config::GpuConfig {
    config::GpuConfig::Cuda { device, partition: config::Partitioning::Mps, memory: None }
}

fn gpus() -> Vec<config::GpuConfig> {
    vec![
        cuda(CudaDevice::Uuid("GPU-1A2b".to_owned())),
        config::GpuConfig::Emulated { sms: Sms(132), memory: None },
        cuda(CudaDevice::Index(0)),
        cuda(CudaDevice::Index(7)),
    ]
}

/// Reads until the readings meet the condition.
fn until(watch: &Watch, what: &str, wanted: impl Fn(&[Option<Reading>]) -> bool) {
    let begun = Instant::now();
    loop {
        let seen = watch.readings().look();
        if wanted(&seen) {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{what}: {seen:?}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

fn usage(reading: &Option<Reading>) -> Option<&Usage> {
    reading.as_ref()?.usage.as_ref()
}

#[test]
fn each_configured_gpu_has_the_reading_of_its_own() {
    let watch = Watch::over(Arc::new(Board::default()), &gpus());
    until(&watch, "both were read", |seen| usage(&seen[0]).is_some() && usage(&seen[2]).is_some());
    let seen = watch.readings().look();
    let identities: Vec<_> =
        seen.iter().map(|seen| seen.as_ref().map(|reading| reading.identity.index)).collect();
    assert_eq!(identities, [Some(1), None, Some(0), None], "by UUID, emulated, by index, not there");
    let usage = usage(&seen[0]).unwrap();
    assert_eq!((usage.memory.used, usage.bytes_of(77), usage.bytes_of(78)), (3 * MIB, Some(MIB), None));
}

#[test]
fn errors_are_counted_for_their_gpu_even_after_events_failed() {
    let board = Board::default();
    let event = |index, xid| Ok(XidEvent { uuid: uuid(index), xid });
    board.xids.lock().extend([event(0, 31), Err(fault()), event(1, 79), event(0, 45), event(5, 13)]);
    let watch = Watch::over(Arc::new(board), &gpus());
    let errors = |reading: &Option<Reading>| reading.as_ref().map(|reading| reading.xid_errors);
    until(&watch, "one and two", |seen| errors(&seen[0]) == Some(1) && errors(&seen[2]) == Some(2));
    assert_eq!(errors(&watch.readings().look()[1]), None);
}

#[test]
fn a_lost_gpu_keeps_its_errors_and_loses_its_usage_until_it_is_back() {
    let board = Arc::new(Board::default());
    board.xids.lock().push_back(Ok(XidEvent { uuid: uuid(1), xid: 79 }));
    let watch = Watch::over(Arc::clone(&board) as Arc<dyn Driver>, &gpus());
    let counted = |reading: &Option<Reading>| reading.as_ref().is_some_and(|reading| reading.xid_errors == 1);
    until(&watch, "all is read", |seen| usage(&seen[0]).is_some() && counted(&seen[0]));
    board.second_is_lost.store(true, Ordering::Relaxed);
    until(&watch, "it is lost", |seen| usage(&seen[0]).is_none());
    let seen = watch.readings().look();
    assert!(counted(&seen[0]));
    assert!(usage(&seen[2]).is_some(), "the other one is read as before");
    board.second_is_lost.store(false, Ordering::Relaxed);
    until(&watch, "it is back", |seen| usage(&seen[0]).is_some());
}

#[test]
fn a_dropped_watch_lets_go_of_the_driver() {
    let board = Arc::new(Board::default());
    drop(Watch::over(Arc::clone(&board) as Arc<dyn Driver>, &gpus()));
    assert_eq!(Arc::strong_count(&board), 1);
}

#[test]
fn without_real_gpus_nothing_is_opened_and_without_a_driver_nothing_fails() {
    let emulated = [config::GpuConfig::Emulated { sms: Sms(132), memory: None }];
    assert_eq!(Watch::start(&emulated).readings().look()[0], None);
    let watch = Watch::start(&gpus());
    assert_eq!(watch.readings().look().len(), gpus().len());
    if let Err(error) = NvmlLibrary::open() {
        assert!(watch.readings().look().iter().all(Option::is_none));
        let said = shadowslice_shared::errors::chain(&error);
        assert!(said.contains("install the driver") || said.contains("load it"), "{said}");
    }
}

#[test]
fn a_process_on_both_lists_is_one_process() {
    let process = |pid, bytes| GpuProcess { pid, bytes };
    let listed = [process(1, Some(5)), process(2, None), process(1, Some(7)), process(2, Some(3))];
    assert_eq!(each_once(listed), [process(1, Some(7)), process(2, Some(3))]);
}

#[test]
fn versions_of_cuda() {
    assert_eq!(CudaVersion::of(13000).to_string(), "13.0");
    assert_eq!(CudaVersion::of(12080).to_string(), "12.8");
    assert!(CudaVersion::of(12090) < CudaVersion::of(13000));
}
