// Reads pages by a list of entries and hands their rows to the core: AXI4 read master, gather and
// row filter.
//
// Blocks are of eight entries with a token to attend to; others are skipped. K of a block is asked for
// before V of the block before it. Credits: no beat is asked for without a place for it.
//
// With `whole` all tokens of all entries are read and pass by, for their checksums. Entries without a token to
// attend to come between the others, K and V one behind the other.
`default_nettype none
module page_reader #(parameter D = 128, parameter DEPTH = 512) (
    input  wire         clk,
    input  wire         rst,
    input  wire         start,            // of a job
    input  wire [63:0]  pages,            // base of the addresses
    input  wire [31:0]  v_offset,
    input  wire         use_mask,
    input  wire         keys_only,        // no V is read
    input  wire         whole,
    // entries, in order
    input  wire         entry_valid,
    output wire         entry_ready,
    input  wire [127:0] entry,
    input  wire         entries_end,      // none comes any more
    input  wire         stop,             // as if an entry were broken
    output reg          broken,           // an entry: until start, and the reader stops
    output reg  [31:0]  broken_code,
    output reg  [31:0]  broken_place,     // of the entry, from the job's first
    output wire         quiet,            // nothing of a read is on the way
    // rows
    output wire         row_valid,
    output wire         row_is_value,
    output wire         row_last,
    input  wire         row_beat,
    output wire [511:0] row_data,
    output wire         finish,
    // beats of `row_data` as they are taken or dropped
    output wire         pass_valid,
    output wire         pass_first,       // of half a page
    output wire         pass_is_value,
    output wire [4:0]   pass_slot,        // of at most 17 pages whose V is still to come
    output wire [11:0]  pass_place,       // of the entry, from the job's first
    input  wire         hold,             // none is to pass, but for the rest of a row
    output reg  [63:0]  beats,            // read since reset
    // AXI4
    output reg          arvalid,
    input  wire         arready,
    output reg  [63:0]  araddr,
    output reg  [7:0]   arlen,
    input  wire         rvalid,
    output wire         rready,
    input  wire [511:0] rdata
);
    localparam NB = D / 32;
    localparam LNB = $clog2(NB);
    localparam AW = $clog2(DEPTH);
    localparam [31:0] ADDRESS = 3, TOKENS = 4;          // of Status

    // Entries: checked, compacted, and one held back to know the last.
    wire [63:0] address = entry[63:0] + pages;
    wire [31:0] tokens = entry[95:64];
    wire address_bad = address == 0 || address[5:0] != 0;
    wire tokens_bad = tokens == 0 || tokens > 16;
    wire [15:0] valid_mask = 16'hffff >> (5'd16 - tokens[4:0]);
    wire [15:0] mask = use_mask ? valid_mask & entry[111:96] : valid_mask;
    reg held, running;
    reg [57:0] held_address;
    reg [4:0] held_tokens;
    reg [15:0] held_mask;
    reg [11:0] held_place, dead_place;
    reg dead, dead_value;                               // an entry that is read for its checksum only; its V
    reg [57:0] dead_address;
    reg [31:0] place;
    wire take_held;
    wire entry_bad = address_bad || tokens_bad;
    wire look = running && !broken && entry_valid
        && (entry_bad || (mask == 0 ? !whole || !dead : !held || take_held));
    assign entry_ready = look || broken;                // behind a broken one they are dropped
    wire bad = look && entry_bad;
    wire next_found = entry_valid && mask != 0 && !entry_bad;
    wire next_known = next_found || (entries_end && !entry_valid);
    wire dead_ready;
    always @(posedge clk) begin
        if (rst || start) begin
            held <= 0;
            dead <= 0;
            dead_value <= 0;
            place <= 0;
            broken <= 0;
            running <= !rst;
        end else begin
            if (look) place <= place + 1;
            if (take_held) held <= 0;
            if (look && next_found) held <= 1;
            if (dead_ready) {dead, dead_value} <= {!dead_value, !dead_value};
            if (look && whole && mask == 0 && !entry_bad) dead <= 1;
            if (stop) broken <= 1;
            if (bad) begin
                broken <= 1;
                broken_code <= tokens_bad ? TOKENS : ADDRESS;
                broken_place <= place;
            end
        end
        if (look && next_found) begin
            held_address <= address[63:6];
            held_tokens <= tokens[4:0];
            held_mask <= mask;
            held_place <= place[11:0];
        end
        if (look && mask == 0) begin
            dead_address <= address[63:6];
            dead_place <= place[11:0];
        end
    end

    // Half pages: K of a block's entries as they come, V from the block's bank.
    reg [90:0] banks [0:15];                            // place, address, tokens, mask
    reg [2:0] index;
    reg [3:0] counts0, counts1;
    reg bank;                                           // of the block whose K is read
    reg have_previous, do_value, list_done, issue, all_issued;
    reg [57:0] issue_address;
    reg [7:0] issue_beats;
    reg value_bank_q;
    wire [90:0] banked = banks[{value_bank_q, index}];
    wire [3:0] value_count = value_bank_q ? counts1 : counts0;
    wire place_free;                                    // for a descriptor
    wire free = running && !broken && !issue && place_free;
    assign dead_ready = free && dead;
    wire key_ready = free && !dead && !do_value && !list_done && held && next_known;
    assign take_held = key_ready;
    wire held_last = !next_found;                       // of the job
    wire key_block_last = index == 7 || held_last;
    wire value_ready = free && !dead && do_value;
    wire half_ready = dead_ready || key_ready || value_ready;
    wire value_last = {1'b0, index} + 4'd1 == value_count;
    wire nothing = running && !issue && !do_value && !list_done && !held && entries_end && !entry_valid;
    wire [4:0] new_tokens = whole ? 5'd16 : do_value ? banked[20:16] : held_tokens;
    always @(posedge clk) begin
        if (rst || start) begin
            index <= 0;
            bank <= 0;
            have_previous <= 0;
            do_value <= 0;
            list_done <= 0;
            all_issued <= 0;
        end else if (key_ready) begin
            banks[{bank, index}] <= {held_place, held_address, held_tokens, held_mask};
            index <= key_block_last ? 3'd0 : index + 3'd1;
            if (bank) counts1 <= {1'b0, index} + 4'd1; else counts0 <= {1'b0, index} + 4'd1;
            if (key_block_last) begin
                list_done <= held_last;
                have_previous <= 1;
                if (keys_only) all_issued <= held_last;
                else if (have_previous || held_last) begin
                    do_value <= 1;
                    value_bank_q <= have_previous ? !bank : bank;
                end else bank <= !bank;
            end
        end else if (value_ready) begin
            index <= value_last ? 3'd0 : index + 3'd1;
            if (value_last) begin
                if (!list_done) begin                   // V of the block before: its bank is free
                    do_value <= 0;
                    bank <= value_bank_q;
                end else if (value_bank_q != bank) value_bank_q <= bank;
                else begin
                    do_value <= 0;
                    all_issued <= 1;
                end
            end
        end else if (nothing) begin
            list_done <= 1;
            all_issued <= 1;
        end
    end

    // Bursts of a half page: at most 64 beats, none across 4 KiB.
    reg [AW:0] credit;
    wire new_is_value = dead ? dead_value : do_value;
    wire [57:0] page_address = dead ? dead_address : do_value ? banked[78:21] : held_address;
    wire [57:0] next_address = page_address + (new_is_value ? {32'd0, v_offset[31:6]} : 58'd0);
    wire [6:0] to_boundary = 7'd64 - {1'b0, issue_address[5:0]};
    wire [6:0] burst = issue_beats < {1'b0, to_boundary} ? issue_beats[6:0] : to_boundary;
    wire ask = issue && (!arvalid || arready) && credit >= {{(AW-6){1'b0}}, burst};
    wire pop;
    always @(posedge clk) begin
        if (rst) begin
            arvalid <= 0;
            issue <= 0;
            credit <= DEPTH;
            beats <= 0;
        end else begin
            if (arvalid && arready) arvalid <= 0;
            if (half_ready) begin
                issue <= 1;
                issue_address <= next_address;
                issue_beats <= {3'd0, new_tokens} << LNB;
            end else if (ask) begin
                arvalid <= 1;
                araddr <= {issue_address, 6'd0};
                arlen <= {1'b0, burst} - 8'd1;
                issue_address <= issue_address + {51'd0, burst};
                issue_beats <= issue_beats - {1'b0, burst};
                if (issue_beats == {1'b0, burst}) issue <= 0;
            end
            credit <= credit - (ask ? {{(AW-6){1'b0}}, burst} : 0) + pop;
            if (rvalid) beats <= beats + 1;
        end
    end

    // Descriptors of half pages, in the order of their beats: kind, last of its block, tokens, mask.
    reg [22:0] descriptors [0:63];
    reg [6:0] put, got;
    wire [6:0] waiting = put - got;
    assign place_free = waiting < 64;
    wire new_last = !dead && (do_value ? value_last : key_block_last);
    wire [15:0] new_mask = dead ? 16'd0 : do_value ? banked[15:0] : held_mask;
    reg [16:0] pages_of [0:63];                         // their slots and places
    reg [16:0] page_now;
    wire descriptor_taken;
    always @(posedge clk) begin
        if (half_ready) begin
            descriptors[put[5:0]] <= {new_is_value, new_last, new_tokens, new_mask};
            pages_of[put[5:0]] <= dead ? {5'd16, dead_place} : {1'b0, do_value ? value_bank_q : bank, index,
                do_value ? banked[90:79] : held_place};
        end
        if (descriptor_taken) page_now <= pages_of[got[5:0]];
    end

    // Beats wait here for the core.
    reg [511:0] memory [0:DEPTH-1];
    reg [AW:0] written, read, available;
    reg [511:0] front;
    wire [AW:0] filled = written - read;
    wire [AW:0] read_next = read + 1'b1;
    assign rready = 1'b1;                               // credits are places
    assign row_data = front;
    always @(posedge clk) begin
        if (rst) begin
            written <= 0;
            read <= 0;
            available <= 0;
        end else begin
            if (rvalid) written <= written + 1'b1;
            if (pop) read <= read_next;
            available <= filled - pop;                  // one cycle behind the write: it is in `front`
        end
        if (rvalid) memory[written[AW-1:0]] <= rdata;
        front <= memory[pop ? read_next[AW-1:0] : read[AW-1:0]];
    end

    // The row filter behind them.
    wire filter_idle, filter_pop, filter_first;
    wire flush = broken && filled != 0 && available != 0;
    assign pop = broken ? flush : filter_pop;
    row_filter #(.NB(NB), .CW(AW + 1)) filter(.clk(clk), .rst(rst || start || broken), .descriptor_valid(waiting != 0),
        .descriptor(descriptors[got[5:0]]), .descriptor_taken(descriptor_taken),
        .available(hold ? {(AW + 1){1'b0}} : available), .pop(filter_pop), .first(filter_first), .row_valid(row_valid), .row_is_value(row_is_value), .row_last(row_last),
        .row_beat(row_beat), .idle(filter_idle));
    assign pass_valid = filter_pop && !broken;
    assign pass_first = filter_first;
    assign pass_is_value = row_is_value;
    assign {pass_slot, pass_place} = page_now;
    assign finish = running && all_issued && !dead && !issue && waiting == 0 && filter_idle;
    assign quiet = !arvalid && !issue && credit == DEPTH;
    always @(posedge clk)
        if (rst || start) begin
            put <= 0;
            got <= 0;
        end else begin
            if (half_ready) put <= put + 1'b1;
            if (descriptor_taken) got <= got + 1'b1;
        end
endmodule
`default_nettype wire
