//! `shadowslice top`: what models and GPUs do, live. What is shown follows from facts alone; `run`
//! asks, draws and reads keys.

mod app;
mod details;
mod facts;
mod gpus;
mod interval;
mod models;
mod room;
mod run;
#[cfg(test)]
mod tests;
mod view;

pub use run::{TopOptions, run};
