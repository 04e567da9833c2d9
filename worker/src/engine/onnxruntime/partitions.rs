//! The partitions on which a model's recordings are ready.
//!
//! Before the worker serves, it creates the contexts of all partitions that a layout can contain.
//! If the worker created a context later, the driver would wait for the batches on the GPU, which
//! takes 5 to 33 ms on an H100 (measured). Only a share that an operator sets may need another
//! partition. The context of such a partition is created at the first use. All models of the process
//! use the same contexts.
//!
//! Instantiating a recording takes about a millisecond, and a model has a dozen recordings or more.
//! A separate thread therefore instantiates them one by one. A batch can use the partition
//! immediately, because the thread instantiates the recording that the batch needs next.
//!
//! A recording can be ready on several partitions at the same time, because recordings allocate no memory
//! while they run: cuBLAS uses the workspace that the worker has set.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};
use shadowslice_shared::batch::PartitionReply;
use shadowslice_shared::groups::{Division, GpuPart, Groups, READY_PARTITIONS};

use super::instantiator::{
    CANCELLED, InstantiateOrder, Instantiator, InstantiatorEvent, NOT_URGENT, StaleExecutables,
};
use crate::device::cuda::graph::{Executable, Recording};
use crate::device::cuda::partition::{GreenContext, SmGroups};
use crate::device::cuda::{CudaError, CudaGpu};
use shadowslice_shared::errors::chain;

/// The maximum number of events that wait for the serving thread. If the channel is full, the
/// instantiator waits until there is space.
const MAX_EVENTS: usize = 256;

/// A partition that is ready or is being prepared.
#[derive(Debug)]
struct Partition {
    executables: Vec<Option<Executable>>,
    /// The number of the recording to instantiate next, because a batch waits for that recording.
    first: Arc<AtomicUsize>,
    complete: bool,
    failed: Option<String>,
}

/// The instantiator, which runs either on the serving thread or on a separate thread.
#[derive(Debug)]
enum InstantiatorHandle {
    /// The instantiator on the serving thread, which is used during the warm-up.
    Here(Option<Box<Instantiator>>),
    Thread {
        order_tx: Option<Sender<InstantiateOrder>>,
        event_rx: Receiver<InstantiatorEvent>,
        thread: Option<JoinHandle<()>>,
    },
}

/// The partitions of a model whose batches are recorded.
#[derive(Debug)]
pub(super) struct RecordedPartitions {
    groups: SmGroups,
    ready: BTreeMap<Groups, Partition>,
    /// The executables of former partitions, which the instantiator drops.
    stale: Vec<StaleExecutables>,
    /// The results that the worker has not fetched yet. Some of them arrived while a batch waited
    /// for a recording.
    results: VecDeque<PartitionReply>,
    /// The recordings that do not fit on a partition. The key is the partition's number of groups.
    /// Kernels that use clusters of 16 blocks do not fit on any partition.
    unfit: BTreeMap<usize, BTreeSet<usize>>,
    maker: InstantiatorHandle,
    gpu: Arc<CudaGpu>,
}

impl RecordedPartitions {
    pub(super) fn new(groups: SmGroups, gpu: Arc<CudaGpu>) -> Result<Self, CudaError> {
        let instantiator = Instantiator::new(Arc::clone(&gpu))?;
        Ok(Self {
            groups,
            ready: BTreeMap::new(),
            stale: Vec::new(),
            results: VecDeque::new(),
            unfit: BTreeMap::new(),
            maker: InstantiatorHandle::Here(Some(Box::new(instantiator))),
            gpu,
        })
    }

    pub(super) fn division(&self) -> &Division {
        self.groups.division()
    }

    /// Adds a recording during the warm-up, and returns its number.
    pub(super) fn add(&mut self, recording: Recording) -> usize {
        match &mut self.maker {
            InstantiatorHandle::Here(Some(instantiator)) => instantiator.add(recording),
            _ => NOT_URGENT,
        }
    }

    /// Starts to prepare a partition. Returns the result if it is already known.
    pub(super) fn prepare(&mut self, groups: Groups) -> Option<PartitionReply> {
        if self.ready.contains_key(&groups) {
            return Some(PartitionReply { groups, result: Ok(()) });
        }
        if self.ready.len() >= READY_PARTITIONS {
            return Some(failed(
                groups,
                "the maximum number of partitions is ready already; forget one first",
            ));
        }
        let context = match self.context(groups) {
            Ok(context) => context,
            Err(why) => return Some(failed(groups, &why)),
        };
        let first = Arc::new(AtomicUsize::new(NOT_URGENT));
        let stale = std::mem::take(&mut self.stale);
        let order = InstantiateOrder { groups, context, first: Arc::clone(&first), stale };
        let partition = Partition { executables: Vec::new(), first, complete: false, failed: None };
        match &mut self.maker {
            InstantiatorHandle::Here(instantiator) => {
                let mut events = Vec::new();
                instantiator.as_mut()?.finish(order, |event| events.push(event));
                self.ready.insert(groups, partition);
                events.into_iter().for_each(|event| self.take(event));
                let Partition { executables, failed, .. } = self.ready.get(&groups)?;
                let none = executables.iter().all(Option::is_none);
                let failed = failed.clone().filter(|_| none);
                Some(PartitionReply { groups, result: failed.map_or(Ok(()), Err) })
            }
            InstantiatorHandle::Thread { order_tx, .. } => {
                match order_tx.as_ref().map(|order_tx| order_tx.send(order)) {
                    // This send never blocks, because the channel has space for one order per ready
                    // partition.
                    Some(Ok(())) => {
                        self.ready.insert(groups, partition);
                        Some(PartitionReply { groups, result: Ok(()) })
                    }
                    _ => Some(failed(groups, "the thread that prepares partitions has ended")),
                }
            }
        }
    }

    fn context(&self, groups: Groups) -> Result<Arc<GreenContext>, String> {
        if !groups.is_run() {
            return Err("the groups of the partition are not adjacent".to_owned());
        }
        self.groups.context(groups).map_err(|fault| chain(&fault))
    }

    pub(super) fn next_prepared(&mut self) -> Option<PartitionReply> {
        while self.results.is_empty() {
            let InstantiatorHandle::Thread { event_rx, .. } = &self.maker else { return None };
            let event = event_rx.try_recv().ok()?;
            self.take(event);
        }
        self.results.pop_front()
    }

    fn take(&mut self, event: InstantiatorEvent) {
        match event {
            InstantiatorEvent::Recording { groups, number, result: Ok(executable) } => {
                if let Some(Partition { executables, .. }) = self.ready.get_mut(&groups) {
                    if executables.len() <= number {
                        executables.resize_with(number + 1, || None);
                    }
                    executables[number] = Some(executable);
                }
            }
            InstantiatorEvent::Recording { groups, number, result: Err(fault) } => {
                let Some(partition) = self.ready.get_mut(&groups) else { return };
                let why = chain(&fault);
                let unfit = self.unfit.entry(groups.count()).or_default();
                match self.maker {
                    InstantiatorHandle::Here(_) => {
                        unfit.insert(number);
                        partition.failed.get_or_insert(why);
                    }
                    InstantiatorHandle::Thread { .. } if unfit.contains(&number) => {}
                    InstantiatorHandle::Thread { .. } => self.results.push_back(failed(groups, &why)),
                }
            }
            InstantiatorEvent::Finished { groups } => {
                let Some(partition) = self.ready.get_mut(&groups) else { return };
                partition.complete = true;
            }
        }
    }

    /// Returns false if the warm-up found that the recording does not fit on partitions with this
    /// number of groups.
    pub(super) fn fits(&self, groups: Groups, recording: usize) -> bool {
        self.unfit.get(&groups.count()).is_none_or(|unfit| !unfit.contains(&recording))
    }

    pub(super) fn has(&self, groups: Groups) -> bool {
        self.ready.contains_key(&groups)
    }

    /// Returns the executable of a recording on a partition. Waits until the executable is
    /// instantiated. Returns `None` if the partition or the recording does not exist.
    pub(super) fn get(&mut self, groups: Groups, recording: usize) -> Option<&Executable> {
        while self.fits(groups, recording) {
            let partition = self.ready.get(&groups)?;
            let there = partition.executables.get(recording).is_some_and(Option::is_some);
            if there || partition.complete {
                break;
            }
            partition.first.store(recording, Ordering::Release);
            let InstantiatorHandle::Thread { event_rx, .. } = &self.maker else { break };
            let event = event_rx.recv().ok()?;
            self.take(event);
        }
        self.ready.get(&groups)?.executables.get(recording)?.as_ref()
    }

    /// Stops using a partition. `in_use` is true if a batch is running on it.
    pub(super) fn forget(&mut self, groups: Groups, in_use: bool) {
        // The instantiator may be instantiating a recording of this partition, and must finish that
        // recording first.
        while self.ready.get(&groups).is_some_and(|partition| !partition.complete) {
            self.ready[&groups].first.store(CANCELLED, Ordering::Release);
            let InstantiatorHandle::Thread { event_rx, .. } = &self.maker else { break };
            let Ok(event) = event_rx.recv() else { break };
            self.take(event);
        }
        let Some(partition) = self.ready.remove(&groups) else { return };
        // If the GPU cannot record a mark, the context is lost, and the GPU no longer runs any work
        // of the partition.
        let last_use = in_use.then(|| self.gpu.mark().ok()).flatten();
        self.stale.push(StaleExecutables { _executables: partition.executables, last_use });
    }

    /// Ends the warm-up, after which a separate thread prepares partitions.
    pub(super) fn finish_warm_up(&mut self) -> Result<(), String> {
        let division = self.division().clone();
        let parts = GpuPart::family().map(|part| division.groups_in(part));
        for groups in parts.filter(|&groups| groups != Groups::WHOLE) {
            self.context(groups)?;
        }
        if let InstantiatorHandle::Here(instantiator) = &mut self.maker
            && let Some(instantiator) = instantiator.take()
        {
            let (order_tx, order_rx) = bounded(READY_PARTITIONS);
            let (event_tx, event_rx) = bounded(MAX_EVENTS);
            let gpu = Arc::clone(&self.gpu);
            let report = move |event| {
                // This send fails only when the worker exits, which also stops this thread.
                event_tx.send(event).ok();
                gpu.wake();
            };
            let thread = std::thread::Builder::new().name("partitions".to_owned());
            let thread = thread.spawn(move || instantiator.work(&order_rx, report));
            let thread = thread
                .map_err(|error| format!("cannot start the thread that prepares partitions: {error}"))?;
            self.maker =
                InstantiatorHandle::Thread { order_tx: Some(order_tx), event_rx, thread: Some(thread) };
        }
        Ok(())
    }
}

impl Drop for InstantiatorHandle {
    fn drop(&mut self) {
        let Self::Thread { order_tx, event_rx, thread } = self else { return };
        drop(order_tx.take());
        // The instantiator may be waiting for space in the channel, so all remaining events are
        // received.
        while event_rx.recv().is_ok() {}
        if let Some(thread) = thread.take() {
            // A panic of the thread is ignored here, because the panic has already been printed.
            thread.join().ok();
        }
    }
}

fn failed(groups: Groups, why: &str) -> PartitionReply {
    PartitionReply { groups, result: Err(why.to_owned()) }
}
