//! Triton's gRPC client for Python, which runs in a separate process.

use std::process::Stdio;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::MeasureError;
use crate::exchange::{elements, model};

use super::VsTritonOptions;
use super::results::PythonClientResult;

/// The maximum time that the client takes for its reply, in addition to the length of the round.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// The process of the client. It exits when its standard input is closed.
pub(crate) struct PythonClient {
    _child: Child,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
    /// The versions of Python and its packages.
    pub(crate) versions: String,
}

impl PythonClient {
    pub(crate) async fn start(options: &VsTritonOptions) -> Result<Self, MeasureError> {
        let script = options.scripts.join("grpc_client.py");
        let mut child = Command::new(&options.python)
            .arg(&script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", options.python.display()))?;
        let stdin = child.stdin.take().ok_or("the Python client has no standard input")?;
        let stdout = child.stdout.take().ok_or("the Python client has no standard output")?;
        let mut stdout = BufReader::new(stdout).lines();
        let versions = answer(&mut stdout, REPLY_TIMEOUT).await?;
        Ok(Self { _child: child, stdin, stdout, versions })
    }

    /// Runs one round against the server at this gRPC address.
    pub(crate) async fn round(
        &mut self,
        address: &str,
        bytes: usize,
        span: Duration,
    ) -> Result<PythonClientResult, MeasureError> {
        let line = format!("{address} {} {} {}\n", model(bytes), elements(bytes), span.as_secs_f64());
        self.stdin.write_all(line.as_bytes()).await?;
        answer(&mut self.stdout, span + REPLY_TIMEOUT).await
    }
}

async fn answer<T: DeserializeOwned>(
    stdout: &mut Lines<BufReader<ChildStdout>>,
    within: Duration,
) -> Result<T, MeasureError> {
    let line = timeout(within, stdout.next_line()).await;
    let line = line.map_err(|_| format!("the Python client did not reply within {within:?}"))??;
    let line = line.ok_or("the Python client ended; see its error above")?;
    Ok(serde_json::from_str(&line)?)
}
