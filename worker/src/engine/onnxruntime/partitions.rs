//! Partitions for which a model's recordings have been made ready.
//!
//! The contexts of the parts that layouts are made of are made before the worker serves: later the
//! driver waits for the batches on the GPU, 5 to 33 ms on an H100 (measured). Only a share that an
//! operator sets may need another partition, whose context is made on its first use. Contexts are
//! never given up, because NVIDIA's driver 580 would keep their memory all the same, 4 MiB each.
//!
//! To make one recording ready takes about a millisecond, and a model has a dozen or more, so a
//! thread makes them one after the other. A batch may name the partition at once: its recording
//! is then made next.
//!
//! A recording that allots memory while it runs, as for cuBLAS's workspaces, can be ready only once
//! at a time. So each execution is recorded as often as partitions may be ready, once for each
//! **seat**.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use shadowslice_shared::batch::PartitionReply;
use shadowslice_shared::groups::{Division, GpuPart, Groups, READY_PARTITIONS};

use super::instantiator::{Instantiator, Left, Made, NO_MORE, NONE_FIRST, Order};
use crate::device::cuda::graph::{Executable, Recording};
use crate::device::cuda::partition::{GreenContext, SmGroups};
use crate::device::cuda::{CudaFault, CudaGpu};
use shadowslice_shared::errors::chain;

/// Results of the thread that were not taken yet; when there are so many, the thread waits.
const MADE: usize = 256;

#[derive(Debug)]
struct Partition {
    seat: usize,
    executables: Vec<Option<Executable>>,
    /// The recording that the thread is to make before the others.
    first: Arc<AtomicUsize>,
    complete: bool,
    failed: Option<String>,
}

#[derive(Debug)]
enum Maker {
    /// While the worker warms up.
    Here(Option<Box<Instantiator>>),
    Thread {
        orders: Option<SyncSender<Order>>,
        made: Receiver<Made>,
        thread: Option<JoinHandle<()>>,
    },
}

#[derive(Debug)]
pub(super) struct Partitions {
    groups: SmGroups,
    contexts: BTreeMap<Groups, Arc<GreenContext>>,
    ready: BTreeMap<Groups, Partition>,
    /// Executables at seats that are free now.
    left: BTreeMap<usize, Left>,
    /// Results that were not asked for yet, some of which came while a batch waited for a
    /// recording.
    news: VecDeque<PartitionReply>,
    /// The recordings that cannot be made ready on partitions of a number of groups, by that number.
    /// Kernels in clusters of 16 blocks fit on no partition.
    unfit: BTreeMap<usize, BTreeSet<usize>>,
    maker: Maker,
    gpu: Arc<CudaGpu>,
}

impl Partitions {
    pub(super) fn new(groups: SmGroups, gpu: Arc<CudaGpu>) -> Result<Self, CudaFault> {
        let workshop = Instantiator::new(Arc::clone(&gpu))?;
        Ok(Self {
            groups,
            contexts: BTreeMap::new(),
            ready: BTreeMap::new(),
            left: BTreeMap::new(),
            news: VecDeque::new(),
            unfit: BTreeMap::new(),
            maker: Maker::Here(Some(Box::new(workshop))),
            gpu,
        })
    }

    pub(super) fn division(&self) -> &Division {
        self.groups.division()
    }

    pub(super) fn copies(&self) -> usize {
        READY_PARTITIONS
    }

    /// While the worker warms up; returns the execution's number.
    pub(super) fn add(&mut self, copies: Vec<Recording>) -> usize {
        match &mut self.maker {
            Maker::Here(Some(workshop)) => workshop.add(copies),
            _ => NONE_FIRST,
        }
    }

    /// Returns the result if it is known at once.
    pub(super) fn prepare(&mut self, groups: Groups) -> Option<PartitionReply> {
        if self.ready.contains_key(&groups) {
            return Some(PartitionReply { groups, result: Ok(()) });
        }
        let taken = |seat: &usize| self.ready.values().any(|partition| partition.seat == *seat);
        let Some(seat) = (0..READY_PARTITIONS).find(|seat| !taken(seat)) else {
            return Some(refused(groups, "as many partitions are ready as may be"));
        };
        let context = match self.context(groups) {
            Ok(context) => context,
            Err(why) => return Some(refused(groups, &why)),
        };
        let first = Arc::new(AtomicUsize::new(NONE_FIRST));
        let before = self.left.remove(&seat);
        let order = Order { seat, groups, context, first: Arc::clone(&first), before };
        let partition = Partition { seat, executables: Vec::new(), first, complete: false, failed: None };
        match &mut self.maker {
            Maker::Here(workshop) => {
                let mut made = Vec::new();
                workshop.as_mut()?.finish(order, |news| made.push(news));
                self.ready.insert(groups, partition);
                made.into_iter().for_each(|made| self.take(made));
                let Partition { executables, failed, .. } = self.ready.get(&groups)?;
                let none = executables.iter().all(Option::is_none);
                let failed = failed.clone().filter(|_| none);
                Some(PartitionReply { groups, result: failed.map_or(Ok(()), Err) })
            }
            Maker::Thread { orders, .. } => match orders.as_ref().map(|orders| orders.send(order)) {
                // The channel has room for an order for each seat, so this does not wait.
                Some(Ok(())) => {
                    self.ready.insert(groups, partition);
                    Some(PartitionReply { groups, result: Ok(()) })
                }
                _ => Some(refused(groups, "the thread that makes partitions has ended")),
            },
        }
    }

    fn context(&mut self, groups: Groups) -> Result<Arc<GreenContext>, String> {
        if let Some(context) = self.contexts.get(&groups) {
            return Ok(Arc::clone(context));
        }
        if !groups.is_run() {
            return Err("its groups are no neighbours".to_owned());
        }
        let context = Arc::new(self.groups.context(groups).map_err(|fault| chain(&fault))?);
        self.contexts.insert(groups, Arc::clone(&context));
        Ok(context)
    }

    pub(super) fn made(&mut self) -> Option<PartitionReply> {
        while self.news.is_empty() {
            let Maker::Thread { made, .. } = &self.maker else { return None };
            let made = made.try_recv().ok()?;
            self.take(made);
        }
        self.news.pop_front()
    }

    fn take(&mut self, made: Made) {
        match made {
            Made::Recording(groups, number, Ok(executable)) => {
                if let Some(Partition { executables, .. }) = self.ready.get_mut(&groups) {
                    if executables.len() <= number {
                        executables.resize_with(number + 1, || None);
                    }
                    executables[number] = Some(executable);
                }
            }
            Made::Recording(groups, number, Err(fault)) => {
                let Some(partition) = self.ready.get_mut(&groups) else { return };
                let why = chain(&fault);
                let unfit = self.unfit.entry(groups.count()).or_default();
                match self.maker {
                    Maker::Here(_) => {
                        unfit.insert(number);
                        partition.failed.get_or_insert(why);
                    }
                    Maker::Thread { .. } if unfit.contains(&number) => {}
                    Maker::Thread { .. } => self.news.push_back(refused(groups, &why)),
                }
            }
            Made::All(groups) => {
                let Some(partition) = self.ready.get_mut(&groups) else { return };
                partition.complete = true;
            }
        }
    }

    /// Returns whether the recording can be made ready on partitions of as many groups, as far as
    /// the warm-up has shown.
    pub(super) fn fits(&self, groups: Groups, recording: usize) -> bool {
        self.unfit.get(&groups.count()).is_none_or(|unfit| !unfit.contains(&recording))
    }

    pub(super) fn has(&self, groups: Groups) -> bool {
        self.ready.contains_key(&groups)
    }

    /// Waits for the recording if need be; `None` if the partition or the recording is not there.
    pub(super) fn get(&mut self, groups: Groups, recording: usize) -> Option<&Executable> {
        while self.fits(groups, recording) {
            let partition = self.ready.get(&groups)?;
            let there = partition.executables.get(recording).is_some_and(Option::is_some);
            if there || partition.complete {
                break;
            }
            partition.first.store(recording, Ordering::Release);
            let Maker::Thread { made, .. } = &self.maker else { break };
            let made = made.recv().ok()?;
            self.take(made);
        }
        self.ready.get(&groups)?.executables.get(recording)?.as_ref()
    }

    /// `in_use`: a batch is on its way there.
    pub(super) fn forget(&mut self, groups: Groups, in_use: bool) {
        // The thread may be at a recording, which must end first: one at most.
        while self.ready.get(&groups).is_some_and(|partition| !partition.complete) {
            self.ready[&groups].first.store(NO_MORE, Ordering::Release);
            let Maker::Thread { made, .. } = &self.maker else { break };
            let Ok(made) = made.recv() else { break };
            self.take(made);
        }
        let Some(partition) = self.ready.remove(&groups) else { return };
        // If no mark can be made, the GPU is lost and runs nothing of the partition.
        let through = in_use.then(|| self.gpu.mark().ok()).flatten();
        self.left.insert(partition.seat, Left { executables: partition.executables, through });
    }

    /// From now on a thread makes partitions ready.
    pub(super) fn warmed_up(&mut self) -> Result<(), String> {
        let division = self.division().clone();
        let parts = GpuPart::family().map(|part| division.groups_in(part));
        for groups in parts.filter(|&groups| groups != Groups::WHOLE) {
            self.context(groups)?;
        }
        if let Maker::Here(workshop) = &mut self.maker
            && let Some(workshop) = workshop.take()
        {
            let (orders, ordered) = sync_channel(READY_PARTITIONS);
            let (done, made) = sync_channel(MADE);
            let gpu = Arc::clone(&self.gpu);
            let tell = move |news| {
                // This fails when the worker ends, which ends the thread, too.
                done.send(news).ok();
                gpu.wake();
            };
            let thread = std::thread::Builder::new().name("partitions".to_owned());
            let thread = thread.spawn(move || workshop.work(&ordered, tell));
            let thread = thread.map_err(|error| format!("no thread can be started: {error}"))?;
            self.maker = Maker::Thread { orders: Some(orders), made, thread: Some(thread) };
        }
        Ok(())
    }
}

impl Drop for Maker {
    fn drop(&mut self) {
        let Self::Thread { orders, made, thread } = self else { return };
        drop(orders.take());
        // The thread may wait for room for its results.
        while made.recv().is_ok() {}
        if let Some(thread) = thread.take() {
            // A panic has been reported by the thread itself.
            thread.join().ok();
        }
    }
}

fn refused(groups: Groups, why: &str) -> PartitionReply {
    PartitionReply { groups, result: Err(why.to_owned()) }
}
