//! Whatever a worker says, and whatever one is told, is read or refused. `cargo bolero test NAME` goes
//! on for as long as it is let.

use shadowslice_shared::batch::{self, Command, WorkerMessage};
use shadowslice_shared::boot::{BootCommand, BootReply};
use shadowslice_shared::frame;

#[test]
fn boot() {
    bolero::check!().for_each(|bytes: &[u8]| {
        frame::decode::<BootReply>(bytes).ok();
        frame::decode::<BootCommand>(bytes).ok();
        frame::receive::<BootReply>(bytes).ok();
    });
}

#[test]
fn batches() {
    bolero::check!().for_each(|bytes: &[u8]| {
        if let Ok(command) = batch::decode::<Command>(bytes) {
            let mut message = vec![0; batch::MAX_MESSAGE_BYTES];
            let again = batch::encode(&command, &mut message).map(|bytes| batch::decode(bytes).ok());
            assert!(again.is_ok_and(|again| again == Some(command)), "what is read can be said again");
        }
        batch::decode::<WorkerMessage>(bytes).ok();
    });
}
