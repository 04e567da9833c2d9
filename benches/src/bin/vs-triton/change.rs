//! A closed loop with clients that go on after failures, while a model is changed or loses its
//! worker.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use shadowslice_benches::MeasureError;
use shadowslice_benches::exchange::{ClientStream, EchoClient, ExchangeError};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::case::{CHANGED_UNDER, SMALL};
use crate::results::ChangeResult;

/// How long the clients run before anything happens.
const BEFORE: Duration = Duration::from_millis(300);

/// A client gives a request up after so long.
const GIVE_UP: Duration = Duration::from_secs(10);

/// How long a client waits after a failure before it asks again.
const PAUSE: Duration = Duration::from_millis(10);

/// How long an answer may take for the model to count as serving again.
const SERVES_WITHIN: Duration = Duration::from_millis(500);

struct Shared {
    seen: Mutex<ChangeResult>,
    happening: AtomicBool,
    over: AtomicBool,
}

/// Makes the change under load, and goes on for `span` after it is done. Returns the clients' view
/// meanwhile.
pub(crate) async fn under_load(
    http: SocketAddr,
    happen: impl Future<Output = Result<(), MeasureError>>,
    span: Duration,
) -> Result<ChangeResult, MeasureError> {
    let shared = Arc::new(Shared {
        seen: Mutex::default(),
        happening: AtomicBool::new(false),
        over: AtomicBool::new(false),
    });
    let mut asking = JoinSet::new();
    for connection in 0..CHANGED_UNDER {
        asking.spawn(keep_asking(http, connection, Arc::clone(&shared)));
    }
    sleep(BEFORE).await;
    shared.happening.store(true, Ordering::Relaxed);
    let begun = Instant::now();
    happen.await?;
    let change_ms = begun.elapsed().as_secs_f64() * 1e3;
    sleep(span).await;
    shared.over.store(true, Ordering::Relaxed);
    while let Some(ended) = asking.join_next().await {
        ended??;
    }
    let serves = matches!(timeout(SERVES_WITHIN, once(http)).await, Ok(Ok(())));
    let seen = shared.seen.lock().clone();
    Ok(ChangeResult { change_ms, serves, ..seen })
}

/// One request on a connection of its own.
pub(crate) async fn once(http: SocketAddr) -> Result<(), ExchangeError> {
    EchoClient::http(ClientStream::tcp(http).await?, SMALL, CHANGED_UNDER).exchange(0).await
}

/// Asks until it is over; only a wrong answer ends it before.
async fn keep_asking(http: SocketAddr, connection: u16, shared: Arc<Shared>) -> Result<(), ExchangeError> {
    let mut client = None;
    let mut turn = 0;
    while !shared.over.load(Ordering::Relaxed) {
        let sent = Instant::now();
        let answer = timeout(GIVE_UP, ask(&mut client, http, connection, turn)).await;
        let failure = match answer {
            Ok(Ok(())) => None,
            Ok(Err(wrong @ ExchangeError::Wrong(_))) => return Err(wrong),
            Ok(Err(fault)) => Some(fault.to_string()),
            Err(_) => Some(format!("no answer within {GIVE_UP:?}")),
        };
        let failed = failure.is_some();
        if shared.happening.load(Ordering::Relaxed) {
            shared.seen.lock().count(sent.elapsed(), failure);
        }
        if failed {
            client = None;
            sleep(PAUSE).await;
        }
        turn += 1;
    }
    Ok(())
}

async fn ask(
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
