//! The thread on which the controllers and the planner run.

use std::io;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use shadowslice_datapath::heartbeat::{HEARTBEAT_INTERVAL, Heartbeat};

use super::events::{Controller, Inbox};
use super::{Order, Planner};
use crate::process::SharedProcesses;

/// The largest number of controllers that wait until the thread runs them.
const MAX_QUEUED_TASKS: usize = 16;

/// A controller that the thread can run.
#[derive(Debug)]
pub struct ControllerTask {
    pub(super) controller: Controller,
    pub(super) inbox: Inbox,
    /// The sender for the controller's orders. The thread sends `Stop` when it stops.
    pub orders: mpsc::Sender<Order>,
}

/// The thread. It accepts controllers while it runs. A controller ends after an order to stop.
#[derive(Debug)]
pub struct ControlThread {
    stop_tx: watch::Sender<bool>,
    cut_tx: Option<oneshot::Sender<()>>,
    ended_rx: oneshot::Receiver<()>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl ControlThread {
    pub fn start(
        planner: Option<Planner>,
        pulse: Heartbeat,
        shared: Arc<SharedProcesses>,
    ) -> io::Result<(Self, mpsc::Sender<ControllerTask>)> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (tasks_tx, tasks_rx) = mpsc::channel(MAX_QUEUED_TASKS);
        let (stop_tx, stop_rx) = watch::channel(false);
        let (cut_tx, cut_rx) = oneshot::channel();
        let (ended_tx, ended_rx) = oneshot::channel();
        let work = move || {
            runtime.block_on(async {
                let planning = async {
                    match planner {
                        Some(planner) => planner.run().await,
                        None => std::future::pending().await,
                    }
                };
                let beating = async {
                    let mut beat = tokio::time::interval(HEARTBEAT_INTERVAL);
                    loop {
                        beat.tick().await;
                        pulse.beat();
                    }
                };
                let running = async {
                    if run(tasks_rx, stop_rx).await {
                        shared.ended().await;
                    }
                };
                tokio::select! {
                    () = running => {}
                    () = beating => {}
                    _ = cut_rx => {}
                    () = planning => {}
                }
            });
            // When the runtime drops processes that still run, they are killed.
            drop(runtime);
            // An error means that nothing waits for the end.
            ended_tx.send(()).ok();
        };
        let thread = std::thread::Builder::new().name("control".to_owned()).spawn(work)?;
        Ok((Self { stop_tx, cut_tx: Some(cut_tx), ended_rx, thread: Some(thread) }, tasks_tx))
    }

    /// Stops all controllers. The thread accepts no further controllers.
    pub fn stop(&self) {
        self.stop_tx.send_replace(true);
    }

    /// Waits until the thread has ended.
    pub async fn ended(&mut self) {
        // An error also means that the thread has ended.
        if !self.ended_rx.is_terminated() {
            (&mut self.ended_rx).await.ok();
        }
    }

    /// Kills all workers and ends the thread immediately.
    pub fn cut(&mut self) {
        if let Some(cut_tx) = self.cut_tx.take() {
            // An error means that the thread has already ended.
            cut_tx.send(()).ok();
        }
        if let Some(thread) = self.thread.take() {
            // An error means that the thread panicked, which the panic hook has reported.
            thread.join().ok();
        }
    }
}

/// Runs controllers until all have stopped, and returns true. Returns false when a controller panics, which is
/// a bug.
async fn run(mut tasks_rx: mpsc::Receiver<ControllerTask>, mut stop_rx: watch::Receiver<bool>) -> bool {
    let mut controllers = JoinSet::new();
    let mut orders_txs: Vec<mpsc::Sender<Order>> = Vec::new();
    let mut stopping = false;
    while !(stopping && controllers.is_empty()) {
        tokio::select! {
            Some(ControllerTask { controller, inbox, orders }) = tasks_rx.recv(), if !stopping => {
                orders_txs.retain(|orders| !orders.is_closed());
                orders_txs.push(orders);
                controllers.spawn(controller.run(inbox));
            }
            Some(ended) = controllers.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(
                        %error,
                        "a model's controller panicked, which is a bug in shadowslice; stopping the supervisor; please report it with the log"
                    );
                    return false;
                }
            }
            // An error means that the sender is gone, so the controllers stop as well.
            _ = stop_rx.wait_for(|stop| *stop), if !stopping => {
                stopping = true;
                for orders in orders_txs.drain(..) {
                    // A controller empties a full queue. If the queue is closed, the controller has ended.
                    orders.send(Order::Stop).await.ok();
                }
            }
        }
    }
    true
}
