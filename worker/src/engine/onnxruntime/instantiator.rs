//! Instantiates a model's recordings on partitions. Once the worker serves, a separate thread
//! instantiates the recordings one by one. It begins with the recordings for which a batch is
//! waiting.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_channel::{Receiver, TryRecvError};
use shadowslice_shared::groups::Groups;

use crate::device::cuda::graph::{Executable, Recording, UploadStream};
use crate::device::cuda::partition::GreenContext;
use crate::device::cuda::{CudaError, CudaGpu, StreamMark};

/// The values of `first` that are not the number of a recording. `NOT_URGENT` means that no
/// recording is urgent, and `CANCELLED` means that the order is cancelled.
pub(super) const NOT_URGENT: usize = usize::MAX;
pub(super) const CANCELLED: usize = usize::MAX - 1;

/// An order to instantiate all recordings on a partition.
#[derive(Debug)]
pub(super) struct InstantiateOrder {
    pub(super) groups: Groups,
    pub(super) context: Arc<GreenContext>,
    pub(super) first: Arc<AtomicUsize>,
    /// The executables of former partitions.
    pub(super) stale: Vec<StaleExecutables>,
}

/// The executables of a partition that is no longer in use.
#[derive(Debug)]
pub(super) struct StaleExecutables {
    pub(super) _executables: Vec<Option<Executable>>,
    pub(super) last_use: Option<StreamMark>,
}

/// An event that the instantiator reports.
#[derive(Debug)]
pub(super) enum InstantiatorEvent {
    /// The result of instantiating one recording.
    Recording { groups: Groups, number: usize, result: Result<Executable, CudaError> },
    /// The end of an order, after which no further recordings are instantiated on these groups.
    Finished { groups: Groups },
}

/// An order, with the numbers of the recordings that are not instantiated yet.
#[derive(Debug)]
struct Unfinished {
    order: InstantiateOrder,
    left: Vec<usize>,
}

/// Instantiates recordings on partitions.
#[derive(Debug)]
pub(super) struct Instantiator {
    recordings: Vec<Recording>,
    uploads: UploadStream,
    unfinished: Vec<Unfinished>,
    /// The executables to drop as soon as no order is unfinished, because a drop waits for their last batch.
    stale: Vec<StaleExecutables>,
    gpu: Arc<CudaGpu>,
}

impl Drop for StaleExecutables {
    fn drop(&mut self) {
        if let Some(last_use) = self.last_use.take() {
            last_use.wait();
        }
    }
}

impl Unfinished {
    /// Returns the urgency of the order. A cancelled order is the most urgent, because the serving
    /// thread waits for its end.
    fn urgency(&self) -> u8 {
        match self.order.first.load(Ordering::Acquire) {
            CANCELLED => 2,
            NOT_URGENT => 0,
            _ => 1,
        }
    }
}

impl Instantiator {
    pub(super) fn new(gpu: Arc<CudaGpu>) -> Result<Self, CudaError> {
        let uploads = UploadStream::new(&gpu)?;
        Ok(Self { recordings: Vec::new(), uploads, unfinished: Vec::new(), stale: Vec::new(), gpu })
    }

    /// Adds a recording, and returns its number.
    pub(super) fn add(&mut self, recording: Recording) -> usize {
        self.recordings.push(recording);
        self.recordings.len() - 1
    }

    pub(super) fn finish(&mut self, order: InstantiateOrder, mut report: impl FnMut(InstantiatorEvent)) {
        self.begin(order);
        while !self.unfinished.is_empty() {
            self.step(&mut report);
        }
        self.stale.clear();
    }

    pub(super) fn work(
        mut self,
        order_rx: &Receiver<InstantiateOrder>,
        mut report: impl FnMut(InstantiatorEvent),
    ) {
        // If the thread cannot bind the context, every order fails, and each failure is reported.
        self.gpu.bind().ok();
        loop {
            let order = match order_rx.try_recv() {
                Err(TryRecvError::Empty) if self.unfinished.is_empty() => {
                    self.stale.clear();
                    order_rx.recv().map_err(|_| TryRecvError::Disconnected)
                }
                order => order,
            };
            match order {
                Ok(order) => self.begin(order),
                Err(TryRecvError::Empty) => self.step(&mut report),
                Err(TryRecvError::Disconnected) => return,
            }
        }
    }

    fn begin(&mut self, mut order: InstantiateOrder) {
        self.stale.append(&mut order.stale);
        let left = (0..self.recordings.len()).collect();
        self.unfinished.push(Unfinished { order, left });
    }

    fn step(&mut self, report: &mut impl FnMut(InstantiatorEvent)) {
        // Among equally urgent orders, the newest order comes first.
        let next = (0..self.unfinished.len()).max_by_key(|&index| self.unfinished[index].urgency());
        let Some(index) = next else { return };
        let Unfinished { order, left } = &mut self.unfinished[index];
        let urgent = order.first.load(Ordering::Acquire);
        if urgent == CANCELLED || left.is_empty() {
            let Unfinished { order, .. } = self.unfinished.remove(index);
            return report(InstantiatorEvent::Finished { groups: order.groups });
        }
        let next = left.iter().position(|&number| number == urgent).unwrap_or(0);
        let number = left.remove(next);
        let recording = &mut self.recordings[number];
        let result = recording.instantiate_on(&order.context, &self.uploads);
        report(InstantiatorEvent::Recording { groups: order.groups, number, result });
    }
}
