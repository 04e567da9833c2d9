//! Work that takes long, such as the parsing of large requests. It must not block the threads that
//! serve connections.

use std::num::NonZero;
use std::sync::LazyLock;

use parking_lot::Mutex;
use shadowslice_datapath::pipeline::RequestFailure;
use tokio::sync::Semaphore;

/// The permits for work on other threads. There are as many as threads that serve connections, so
/// that half of the cores remain for connections.
static PERMITS: LazyLock<Semaphore> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    Semaphore::new((cores / 2).max(1))
});

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs `work` on a thread that serves no connections. `what` describes the work in errors.
pub(crate) async fn run_blocking<T, E>(
    what: &str,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E>
where
    T: Send + 'static,
    E: From<RequestFailure> + Send + 'static,
{
    let permit = PERMITS.acquire().await;
    let done = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        work()
    });
    let done = done.await;
    done.unwrap_or_else(|why| Err(RequestFailure::Internal(format!("{what} failed: {why}")).into()))
}

/// Runs `work` on this thread, while no other thread runs such work.
pub(crate) fn one_at_a_time<T>(work: impl FnOnce() -> T) -> T {
    let _turn = ONE_AT_A_TIME.lock();
    work()
}
