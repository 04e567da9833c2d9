//! Upgrades: a supervisor takes over from another one on the same host, while clients are served.
//!
//! ```text
//! previous supervisor                          next supervisor
//! starts it -- listening sockets, lock ------> creates its models, without workers
//!                                              starts the workers of one model
//! relays the model's requests  <-------------- reports that the model serves
//! ends its own workers ----------------------> ... and so on with each model
//! relays requests until its                    accepts connections
//! last client has disconnected
//! ```
//!
//! Models move one by one, so that a GPU needs memory for one more model and not for all models twice.
//! Until the last one has moved, the upgrade can fail. Then the models move back in the same way.

mod messages;
mod persist;
mod predecessor;
mod successor;
mod upgrade;

pub use messages::FinalState;
pub use persist::persist;
pub use predecessor::{Conversation, Predecessor};
pub use successor::{Successor, program};
pub use upgrade::Succession;
