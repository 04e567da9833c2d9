//! The files that packages install besides the program: completions for shells, and manual pages.

use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use shadowslice_shared::exit::{self, fail};

pub(crate) fn completions(mut command: Command, shell: Shell) -> u8 {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    exit::print(&String::from_utf8_lossy(&script))
}

/// Writes a page for the program, and one for each of its commands.
pub(crate) fn pages(command: Command, folder: &Path) -> u8 {
    let written = clap_mangen::generate_to(command, folder);
    written.map_or_else(|error| unwritten(folder, &error), |()| 0)
}

fn unwritten(folder: &Path, error: &io::Error) -> u8 {
    fail(&format!("cannot write the manual pages to {}: {error}", folder.display()), exit::UNAVAILABLE)
}
