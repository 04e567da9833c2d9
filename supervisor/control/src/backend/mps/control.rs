//! The control program as a client of its daemon. Each command runs a short-lived process.

use std::path::PathBuf;
use std::time::Duration;

use super::Limits;
use super::replies::{self, ServerStatus};
use crate::backend::Variables;
use crate::backend::command::{self, CommandError};

const PROGRAM: &str = "nvidia-cuda-mps-control";

/// The variable with the path of the control program, for programs outside `PATH` and for tests.
const PROGRAM_VARIABLE: &str = "SHADOWSLICE_MPS_CONTROL";

pub fn control_program() -> PathBuf {
    std::env::var_os(PROGRAM_VARIABLE).map_or_else(|| PathBuf::from(PROGRAM), PathBuf::from)
}

#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("the MPS control command `{command}` failed")]
    Command {
        command: String,
        #[source]
        source: CommandError,
    },
    #[error("the MPS control program rejected `{command}`: {said}")]
    Refused { command: String, said: String },
    #[error("unexpected reply of the MPS control program to `{command}`: {said:?}")]
    Unclear { command: String, said: String },
}

#[derive(Debug, Clone)]
pub struct Control {
    pub(super) program: PathBuf,
    pub(super) environment: Variables,
    pub(super) limits: Limits,
    pub(super) several_users: bool,
}

impl Control {
    pub(super) async fn send(&self, command: &str) -> Result<String, ControlError> {
        self.run(command, self.limits.command).await
    }

    async fn run(&self, command: &str, limit: Duration) -> Result<String, ControlError> {
        let input = format!("{command}\n");
        let said = command::run(&self.program, &[], &self.environment, &input, limit).await;
        let said = said.map_err(|source| ControlError::Command { command: command.to_owned(), source })?;
        if said.status.success() {
            return Ok(said.out);
        }
        let words = format!("{} {}", said.out.trim(), said.err.trim());
        let said = format!("{} ({})", words.trim(), said.status);
        Err(ControlError::Refused { command: command.to_owned(), said })
    }

    pub(super) async fn servers(&self) -> Result<Vec<i32>, ControlError> {
        self.pids("get_server_list".to_owned()).await
    }

    pub(super) async fn clients(&self, server: i32) -> Result<Vec<i32>, ControlError> {
        self.pids(format!("get_client_list {server}")).await
    }

    async fn pids(&self, command: String) -> Result<Vec<i32>, ControlError> {
        let said = self.send(&command).await?;
        replies::pids(&said).ok_or(ControlError::Unclear { command, said })
    }

    pub(super) async fn server_status(&self, server: i32) -> Result<ServerStatus, ControlError> {
        let said = self.send(&format!("get_server_status {server}")).await?;
        Ok(replies::server_status(&said))
    }

    /// Starts a server for this user. The server is ready some time later.
    pub(super) async fn start_server(&self, uid: u32) -> Result<(), ControlError> {
        self.send(&format!("start_server -uid {uid}")).await.map(drop)
    }

    /// Ends a client's work on the GPU.
    pub(super) async fn terminate(&self, server: i32, client: i32) -> Result<(), ControlError> {
        let command = format!("terminate_client {server} {client}");
        let said = self.send(&command).await?;
        if replies::is_terminated(&said) { Ok(()) } else { Err(ControlError::Unclear { command, said }) }
    }

    /// Stops the daemon, which first waits for all clients to exit.
    pub(super) async fn quit(&self) -> Result<(), ControlError> {
        self.run("quit", self.limits.quit).await.map(drop)
    }
}
