//! The thread on which the controllers run, and the planner.

use std::io;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use shadowslice_datapath::heartbeat::{HEARTBEAT_INTERVAL, Heartbeat};

use super::events::{Controller, Inbox};
use super::{Order, Planner};

/// Controllers that may wait to be run.
const WAITING: usize = 16;

#[derive(Debug)]
pub struct ControllerTask {
    pub(super) controller: Controller,
    pub(super) inbox: Inbox,
    /// Its orders: it is told to stop when all is to end.
    pub orders: mpsc::Sender<Order>,
}

/// The thread. Controllers come to it while it runs, and go when they are told to stop.
#[derive(Debug)]
pub struct ControlThread {
    stop: watch::Sender<bool>,
    cut: Option<oneshot::Sender<()>>,
    ended: oneshot::Receiver<()>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl ControlThread {
    pub fn start(
        planner: Option<Planner>,
        pulse: Heartbeat,
    ) -> io::Result<(Self, mpsc::Sender<ControllerTask>)> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (hire, hired) = mpsc::channel(WAITING);
        let (stop, stopped) = watch::channel(false);
        let (cut, cut_short) = oneshot::channel();
        let (end, ended) = oneshot::channel();
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
                tokio::select! {
                    () = run(hired, stopped) => {}
                    () = beating => {}
                    _ = cut_short => {}
                    () = planning => {}
                }
            });
            // Processes that are still there are killed as the runtime drops them.
            drop(runtime);
            // An error means that the end is not waited for.
            end.send(()).ok();
        };
        let thread = std::thread::Builder::new().name("control".to_owned()).spawn(work)?;
        Ok((Self { stop, cut: Some(cut), ended, thread: Some(thread) }, hire))
    }

    /// Tells all controllers to stop, and takes no more of them.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    pub async fn ended(&mut self) {
        // An error means that the thread is gone, which is an end, too.
        if !self.ended.is_terminated() {
            (&mut self.ended).await.ok();
        }
    }

    /// Kills all workers and ends at once.
    pub fn cut(&mut self) {
        if let Some(cut) = self.cut.take() {
            // The thread may have ended already.
            cut.send(()).ok();
        }
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// Ends also when a controller panics, which is a fault of this program.
async fn run(mut hired: mpsc::Receiver<ControllerTask>, mut stop: watch::Receiver<bool>) {
    let mut controllers = JoinSet::new();
    let mut told: Vec<mpsc::Sender<Order>> = Vec::new();
    let mut stopping = false;
    while !(stopping && controllers.is_empty()) {
        tokio::select! {
            Some(ControllerTask { controller, inbox, orders }) = hired.recv(), if !stopping => {
                told.retain(|orders| !orders.is_closed());
                told.push(orders);
                controllers.spawn(controller.run(inbox));
            }
            Some(ended) = controllers.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(
                        %error,
                        "a model's controller panicked, which is a bug in shadowslice; stopping the supervisor; please report it with the log"
                    );
                    return;
                }
            }
            // An error means that the sender of the stop is gone.
            _ = stop.wait_for(|stop| *stop), if !stopping => {
                stopping = true;
                for orders in told.drain(..) {
                    // The controller empties a full queue; a closed one means that it has ended.
                    orders.send(Order::Stop).await.ok();
                }
            }
        }
    }
}
