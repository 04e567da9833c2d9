//! A closed loop during a change to a model. Its clients continue after a failure.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::MeasureError;
use crate::exchange::{ClientStream, EchoClient, ExchangeError};

use super::case::{CHANGE_CONNECTIONS, SMALL};
use super::results::ChangeResult;

/// The time for which the clients send requests before the change starts.
const TIME_BEFORE_CHANGE: Duration = Duration::from_millis(300);

const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The time that a client waits after a failure.
const RETRY_BACKOFF: Duration = Duration::from_millis(10);

/// The time limit of the request that checks whether the model answers at the end.
const CHECK_TIMEOUT: Duration = Duration::from_millis(500);

/// The state that all clients share.
struct ChangeLoopState {
    result: Mutex<ChangeResult>,
    /// True once the change has started. Only requests that end after that are counted.
    has_begun: AtomicBool,
    over: AtomicBool,
}

/// Performs `change` under load. The load starts before the change and continues for `span` after
/// it. Returns the outcomes of the requests that ended after the start of the change.
pub(crate) async fn under_load(
    http: SocketAddr,
    change: impl Future<Output = Result<(), MeasureError>>,
    span: Duration,
) -> Result<ChangeResult, MeasureError> {
    let shared = Arc::new(ChangeLoopState {
        result: Mutex::default(),
        has_begun: AtomicBool::new(false),
        over: AtomicBool::new(false),
    });
    let mut clients = JoinSet::new();
    for connection in 0..CHANGE_CONNECTIONS {
        clients.spawn(send_until_over(http, connection, Arc::clone(&shared)));
    }
    sleep(TIME_BEFORE_CHANGE).await;
    shared.has_begun.store(true, Ordering::Relaxed);
    let start = Instant::now();
    change.await?;
    let change_ms = start.elapsed().as_secs_f64() * 1e3;
    sleep(span).await;
    shared.over.store(true, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended??;
    }
    let serves = matches!(timeout(CHECK_TIMEOUT, infer_once(http)).await, Ok(Ok(())));
    let result = shared.result.lock().clone();
    Ok(ChangeResult { change_ms, serves, ..result })
}

/// Sends one request on a new connection, and checks the answer.
pub(crate) async fn infer_once(http: SocketAddr) -> Result<(), ExchangeError> {
    EchoClient::http(ClientStream::tcp(http).await?, SMALL, CHANGE_CONNECTIONS).exchange(0).await
}

/// Sends requests until the load is over. A wrong answer ends the loop early, but other failures do
/// not.
async fn send_until_over(
    http: SocketAddr,
    connection: u16,
    shared: Arc<ChangeLoopState>,
) -> Result<(), ExchangeError> {
    let mut client = None;
    let mut turn = 0;
    while !shared.over.load(Ordering::Relaxed) {
        let sent = Instant::now();
        let answer = timeout(REQUEST_TIMEOUT, exchange(&mut client, http, connection, turn)).await;
        let failure = match answer {
            Ok(Ok(())) => None,
            Ok(Err(wrong @ ExchangeError::Wrong(_))) => return Err(wrong),
            Ok(Err(fault)) => Some(fault.to_string()),
            Err(_) => Some(format!("no answer within {REQUEST_TIMEOUT:?}")),
        };
        let failed = failure.is_some();
        if shared.has_begun.load(Ordering::Relaxed) {
            shared.result.lock().count(sent.elapsed(), failure);
        }
        if failed {
            client = None;
            sleep(RETRY_BACKOFF).await;
        }
        turn += 1;
    }
    Ok(())
}

async fn exchange(
    client: &mut Option<EchoClient>,
    http: SocketAddr,
    connection: u16,
    turn: usize,
) -> Result<(), ExchangeError> {
    let connected = match client.take() {
        Some(connected) => connected,
        None => EchoClient::http(ClientStream::tcp(http).await?, SMALL, connection),
    };
    client.insert(connected).exchange(turn).await
}

impl ChangeResult {
    fn count(&mut self, took: Duration, failure: Option<String>) {
        self.longest_ms = self.longest_ms.max(took.as_secs_f64() * 1e3);
        match failure {
            None => self.answered += 1,
            Some(why) => {
                self.failed += 1;
                self.first_failure.get_or_insert(why);
            }
        }
    }
}
