//! `shadowslice top` shows models and GPUs live in a terminal. `run` polls the supervisor, reads
//! keys and draws. The other modules convert replies into lines and do no I/O.

mod app;
mod details;
mod gpus;
mod models;
mod room;
mod run;
mod snapshot;
#[cfg(test)]
mod tests;
mod view;

pub use run::{TopOptions, run};
pub use snapshot::TopReply;
