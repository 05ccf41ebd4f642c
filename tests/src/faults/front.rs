//! An address that refuses connections while it is down, and stays reserved.

use std::io;
use std::net::SocketAddr;

use parking_lot::Mutex;
use socket2::{Domain, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// Forwards to a provider while it is up; while it is down the kernel refuses whoever comes.
pub struct Front {
    pub addr: SocketAddr,
    target: String,
    /// Bound and never listening: nobody else gets the port in between.
    _reserved: Socket,
    running: Mutex<Option<JoinHandle<()>>>,
}

impl Front {
    /// Down at first.
    ///
    /// # Panics
    /// When loopback is not there.
    pub fn of(target: &str) -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket
            .bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())
            .unwrap();
        let addr = socket.local_addr().unwrap().as_socket().unwrap();
        Self {
            addr,
            target: target.to_owned(),
            _reserved: socket,
            running: Mutex::new(None),
        }
    }

    /// The base URL for a provider's configuration.
    pub fn url(&self) -> String {
        format!("http://{}/v1", self.addr)
    }

    /// Takes connections.
    ///
    /// # Panics
    /// When the port was lost.
    pub async fn up(&self) {
        let listener = TcpListener::bind(self.addr).await.unwrap();
        let target = self.target.clone();
        let running = tokio::spawn(async move {
            let mut passages = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                passages.spawn(pass(socket, target.clone()));
            }
        });
        *self.running.lock() = Some(running);
    }

    /// Closes every connection and refuses new ones; down when it returns.
    pub async fn down(&self) {
        let running = self.running.lock().take();
        if let Some(running) = running {
            running.abort();
            let _ = running.await;
        }
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        if let Some(running) = self.running.lock().take() {
            running.abort();
        }
    }
}

async fn pass(mut from: TcpStream, target: String) -> io::Result<()> {
    let mut to = TcpStream::connect(&target).await?;
    from.set_nodelay(true)?;
    to.set_nodelay(true)?;
    tokio::io::copy_bidirectional(&mut from, &mut to).await?;
    Ok(())
}
