// The kernel `attend`: arguments by AXI4-Lite, lists and queries by one AXI4 port, pages by another,
// partials, digests and status by a third. Jobs run one after another.
`default_nettype none
module attend #(parameter D = 128, parameter G = 1) (
    input  wire         clk,
    input  wire         rst,
    input  wire         s_awvalid, output wire s_awready, input wire [11:0] s_awaddr,
    input  wire         s_wvalid, output wire s_wready, input wire [31:0] s_wdata, input wire [3:0] s_wstrb,
    output wire         s_bvalid, input wire s_bready,
    input  wire         s_arvalid, output wire s_arready, input wire [11:0] s_araddr,
    output wire         s_rvalid, input wire s_rready, output wire [31:0] s_rdata,
    output wire         interrupt,
    output wire         list_arvalid, input wire list_arready, output wire [63:0] list_araddr,
    output wire [7:0]   list_arlen, input wire list_rvalid, output wire list_rready, input wire [511:0] list_rdata,
    input wire [1:0]    list_rresp,
    output wire         page_arvalid, input wire page_arready, output wire [63:0] page_araddr,
    output wire [7:0]   page_arlen, input wire page_rvalid, output wire page_rready, input wire [511:0] page_rdata,
    input wire [1:0]    page_rresp,
    output wire         out_awvalid, input wire out_awready, output wire [63:0] out_awaddr, output wire [7:0] out_awlen,
    output wire         out_wvalid, input wire out_wready, output wire [511:0] out_wdata,
    output wire [63:0]  out_wstrb, output wire out_wlast, input wire out_bvalid, output wire out_bready,
    input wire [1:0]    out_bresp
);
    localparam NB = D / 32;
    localparam QUERY_BEATS = G * NB;
    localparam PARTIAL_BEATS = 2 * QUERY_BEATS + 1;
    localparam WORDS = 64;
    // Places of arguments in the call.
    localparam [31:0] AT_Q = 0, AT_PAGES = 1, AT_ENTRIES = 2, AT_JOBS = 3, AT_OUT = 4, AT_DIGESTS = 5, AT_STATUS = 6,
        AT_JOB_COUNT = 7, AT_V_OFFSET = 9;

    wire [32*WORDS-1:0] words;
    wire go;
    reg done;
    control_registers #(.WORDS(WORDS)) control(.clk(clk), .rst(rst), .awvalid(s_awvalid), .awready(s_awready),
        .awaddr(s_awaddr), .wvalid(s_wvalid), .wready(s_wready), .wdata(s_wdata), .wstrb(s_wstrb), .bvalid(s_bvalid),
        .bready(s_bready), .arvalid(s_arvalid), .arready(s_arready), .araddr(s_araddr), .rvalid(s_rvalid),
        .rready(s_rready), .rdata(s_rdata), .words(words), .start(go), .done(done), .interrupt(interrupt));
    wire [63:0] q = words[8*ssdkv_fpga::REG_ATTEND_Q +: 64];
    wire [63:0] pages = words[8*ssdkv_fpga::REG_ATTEND_PAGES +: 64];
    wire [63:0] entries = words[8*ssdkv_fpga::REG_ATTEND_ENTRIES +: 64];
    wire [63:0] jobs = words[8*ssdkv_fpga::REG_ATTEND_JOBS +: 64];
    wire [63:0] out = words[8*ssdkv_fpga::REG_ATTEND_OUT +: 64];
    wire [63:0] digests = words[8*ssdkv_fpga::REG_ATTEND_DIGESTS +: 64];
    wire [63:0] status = words[8*ssdkv_fpga::REG_ATTEND_STATUS +: 64];
    wire [31:0] job_count = words[8*ssdkv_fpga::REG_ATTEND_JOB_COUNT +: 32];
    wire [31:0] entry_count = words[8*ssdkv_fpga::REG_ATTEND_ENTRY_COUNT +: 32];
    wire [31:0] v_offset = words[8*ssdkv_fpga::REG_ATTEND_V_OFFSET +: 32];
    wire [31:0] scale_log2e = words[8*ssdkv_fpga::REG_ATTEND_SCALE_LOG2E +: 32];
    wire [31:0] flags = words[8*ssdkv_fpga::REG_ATTEND_FLAGS +: 32];

    wire v_offset_bad = v_offset < 32 * D || v_offset[5:0] != 0;
    wire checked = (flags & ssdkv_fpga::FLAG_CHECKSUM) != 0;
    wire digests_bad = checked && digests[2:0] != 0;

    // What is read by the lists' port, and written.
    reg [31:0] listed, written;
    wire failed;
    wire [31:0] failed_place;
    memory_errors errors(.clk(clk), .rst(rst), .start(go), .answered({out_bvalid && out_bready,
        page_rvalid && page_rready, list_rvalid && list_rready}), .response({out_bresp, page_rresp, list_rresp}),
        .argument({written, AT_PAGES, listed}), .failed(failed), .place(failed_place));

    localparam [3:0] IDLE = 0, CHECK = 1, JOB = 2, JOB_BEAT = 3, JOB_CHECK = 4, QUERY = 5, ENTRIES = 6,
        RUN = 7, STOP = 8, STATUS = 9, STATUS_WAIT = 10, OUT = 11;
    reg [3:0] state;
    reg [31:0] code, place, job;
    reg [63:0] cycles;
    reg [511:0] job_beat;
    wire [127:0] now = job_beat[128*job[1:0] +: 128];
    wire [31:0] job_first = now[31:0], job_entries = now[63:32], job_query = now[95:64], job_out = now[127:96];
    wire [32:0] job_end = {1'b0, job_first} + {1'b0, job_entries};

    // A product by adders, not by multipliers, whose number is the core's.
    function automatic [63:0] times(input [31:0] x, input integer factor);
        integer bit_;
        begin
            times = 0;
            for (bit_ = 0; bit_ < 24; bit_ = bit_ + 1)
                if (factor[bit_]) times = times + ({32'd0, x} << bit_);
        end
    endfunction

    // Lists and queries.
    reg list_start;
    reg [57:0] list_address;
    reg [15:0] list_beats;
    reg entries_on;                            // what comes are entries
    wire list_idle, list_valid, entry_room;
    wire [511:0] list_data;
    list_reader lists(.clk(clk), .rst(rst), .start(list_start), .address(list_address), .beats(list_beats),
        .room(!entries_on || entry_room), .idle(list_idle), .out_valid(list_valid), .out_data(list_data),
        .arvalid(list_arvalid), .arready(list_arready), .araddr(list_araddr), .arlen(list_arlen),
        .rvalid(list_rvalid), .rready(list_rready), .rdata(list_rdata));

    // Entries wait here, four a beat.
    reg [511:0] waiting [0:31];
    reg [5:0] put, got;
    wire [5:0] beats_waiting = put - got;
    reg [31:0] entry_index, entry_end;
    reg entries_started;
    wire entry_valid = beats_waiting != 0 && entry_index != entry_end;
    wire entry_ready, entry_taken = entry_valid && entry_ready;
    wire [511:0] entry_beat = waiting[got[4:0]];
    wire [127:0] entry = entry_beat[128*entry_index[1:0] +: 128];
    assign entry_room = beats_waiting <= 16;
    wire job_start = state == QUERY && list_start;
    always @(posedge clk) begin
        if (rst || job_start) begin
            put <= 0;
            got <= 0;
            entry_index <= job_first;
            entry_end <= job_end[31:0];
        end else begin
            if (entries_on && list_valid) put <= put + 1'b1;
            if (entry_taken) begin
                entry_index <= entry_index + 1;
                if (entry_index[1:0] == 3 || entry_index + 1 == entry_end) got <= got + 1'b1;
            end
        end
        if (entries_on && list_valid) waiting[put[4:0]] <= list_data;
    end

    // Rows, core, partials.
    wire broken, quiet, row_valid, row_is_value, row_last, row_beat, finish;
    wire pass_valid, pass_first, pass_is_value, hold;
    wire [4:0] pass_slot;
    wire [11:0] pass_place;
    wire [31:0] broken_code, broken_place;
    wire [511:0] row_data, core_data;
    wire [63:0] beats;
    reg [63:0] beats_before;
    wire core_idle, core_valid, core_ready, core_last, writer_ready;
    page_reader #(.D(D)) reader(.clk(clk), .rst(rst), .start(job_start), .pages(pages), .v_offset(v_offset),
        .use_mask((flags & ssdkv_fpga::FLAG_MASK) != 0), .keys_only(1'b0), .whole(checked), .entry_valid(entry_valid),
        .entry_ready(entry_ready), .entry(entry), .entries_end(entries_started && entry_index == entry_end),
        .stop(failed), .broken(broken), .broken_code(broken_code),
        .broken_place(broken_place), .quiet(quiet), .row_valid(row_valid), .row_is_value(row_is_value),
        .row_last(row_last), .row_beat(row_beat), .row_data(row_data), .finish(finish),
        .pass_valid(pass_valid), .pass_first(pass_first), .pass_is_value(pass_is_value), .pass_slot(pass_slot),
        .pass_place(pass_place), .hold(hold), .beats(beats),
        .arvalid(page_arvalid), .arready(page_arready), .araddr(page_araddr), .arlen(page_arlen),
        .rvalid(page_rvalid), .rready(page_rready), .rdata(page_rdata));
    reg core_reset;
    attention_core #(.D(D), .G(G)) core(.clk(clk), .rst(rst || core_reset), .start(job_start),
        .bf16((flags & ssdkv_fpga::FLAG_BFLOAT16) != 0), .score_scale({G{scale_log2e}}),
        .q_valid(state == QUERY && list_valid), .q_data(list_data), .row_valid(row_valid),
        .row_is_value(row_is_value), .row_last(row_last), .row_beat(row_beat), .row_data(row_data),
        .finish(finish && entries_started), .idle(core_idle), .out_valid(core_valid), .out_ready(core_ready), .out_last(core_last),
        .out_data(core_data));

    // Digests of the pages that pass by, to their places.
    wire digest_valid, digest_ready, digests_done, pages_done, digest_out, digest_sent, digests_idle;
    wire [11:0] digest_place;
    wire [63:0] digest, digest_strobe;
    wire [57:0] digest_address;
    wire [511:0] digest_data;
    reg write_digests;
    checksum #(.D(D)) sums(.clk(clk), .rst(rst || job_start), .beat_valid(pass_valid && checked), .beat(row_data),
        .beat_first(pass_first), .is_value(pass_is_value), .slot(pass_slot), .place(pass_place), .hold(hold),
        .idle(pages_done), .out_valid(digest_valid), .out_ready(digest_ready), .out_place(digest_place),
        .out_digest(digest));
    digest_writer digest_beats(.clk(clk), .rst(rst || job_start), .base(digests[63:3] + {29'd0, job_first}),
        .in_valid(digest_valid), .in_ready(digest_ready), .in_place(digest_place), .in_digest(digest),
        .flush(finish && pages_done), .out_valid(digest_out), .out_ready(digest_sent), .out_address(digest_address),
        .out_data(digest_data), .out_strobe(digest_strobe), .idle(digests_idle));
    assign digests_done = pages_done && digests_idle;

    reg write_start, write_status;
    reg [63:0] write_address;
    reg [15:0] write_beats;
    wire writer_idle;
    wire [511:0] status_beat = {256'd0, beats - beats_before, cycles, job, 32'(ssdkv_fpga::VERSION), place, code};
    assign core_ready = writer_ready && state == OUT;
    assign digest_sent = writer_ready && write_digests;
    record_writer writer(.clk(clk), .rst(rst), .start(write_start), .address(write_address), .beats(write_beats),
        .idle(writer_idle), .in_valid(write_status || write_digests || (state == OUT && core_valid)),
        .in_ready(writer_ready),
        .in_data(write_status ? status_beat : write_digests ? digest_data : core_data),
        .in_strobe(write_digests ? digest_strobe : {64{1'b1}}), .awvalid(out_awvalid), .awready(out_awready),
        .awaddr(out_awaddr), .awlen(out_awlen), .wvalid(out_wvalid), .wready(out_wready), .wdata(out_wdata),
        .wstrb(out_wstrb), .wlast(out_wlast), .bvalid(out_bvalid), .bready(out_bready));

    wire [31:0] first_beat = {2'd0, job_first[31:2]};
    wire [31:0] end_beat = {2'd0, job_end[31:2]} + (job_end[1:0] != 0);
    always @(posedge clk) begin
        done <= 0;
        list_start <= 0;
        write_start <= 0;
        core_reset <= 0;
        cycles <= cycles + 1;
        if (digest_sent) write_digests <= 0;
        if (rst) begin
            state <= IDLE;
            entries_on <= 0;
            write_status <= 0;
            write_digests <= 0;
            entries_started <= 0;
        end else case (state)
            IDLE: if (go) begin
                state <= CHECK;
                code <= ssdkv_fpga::STATUS_OK;
                place <= 0;
                job <= 0;
                cycles <= 0;
                beats_before <= beats;
                entries_on <= 0;
            end
            CHECK: begin
                state <= JOB;
                if (job_count > ssdkv_fpga::MAX_JOBS || v_offset_bad || digests_bad) begin
                    state <= STOP;
                    code <= ssdkv_fpga::STATUS_ARGUMENT;
                    place <= job_count > ssdkv_fpga::MAX_JOBS ? AT_JOB_COUNT : v_offset_bad ? AT_V_OFFSET : AT_DIGESTS;
                end
            end
            JOB: if (job == job_count || failed) state <= STOP;
                else if (job[1:0] != 0) state <= JOB_CHECK;
                else begin
                    state <= JOB_BEAT;
                    list_start <= 1;
                    listed <= AT_JOBS;
                    list_address <= jobs[63:6] + {28'd0, job[31:2]};
                    list_beats <= 1;
                end
            JOB_BEAT: if (list_valid) begin
                state <= JOB_CHECK;
                job_beat <= list_data;
            end
            JOB_CHECK: begin
                if (failed) state <= STOP;
                else if (job_end > {1'b0, entry_count} || job_entries > ssdkv_fpga::MAX_JOB_ENTRIES) begin
                    state <= STOP;
                    code <= job_end > {1'b0, entry_count} ? ssdkv_fpga::STATUS_JOB_ENTRIES : ssdkv_fpga::STATUS_JOB_LENGTH;
                    place <= job;
                end else if (list_idle) begin
                    state <= QUERY;
                    list_start <= 1;
                    listed <= AT_Q;
                    list_address <= q[63:6] + times(job_query, QUERY_BEATS);
                    list_beats <= QUERY_BEATS;
                end
            end
            QUERY: if (!list_start && list_idle) begin
                state <= ENTRIES;
                entries_on <= 1;
                listed <= AT_ENTRIES;
                list_start <= job_entries != 0;
                list_address <= entries[63:6] + {26'd0, first_beat};
                list_beats <= end_beat - first_beat;
            end
            ENTRIES: begin
                state <= RUN;
                entries_started <= 1;
            end
            RUN: if (broken) begin
                state <= STOP;
                code <= broken_code;
                place <= job_first + broken_place;
            end else if (digest_out && writer_idle && !write_digests) begin
                write_start <= 1;
                write_digests <= 1;
                written <= AT_DIGESTS;
                write_address <= {digest_address, 6'd0};
                write_beats <= 1;
            end else if (core_valid && digests_done && writer_idle) begin
                state <= OUT;
                write_start <= 1;
                written <= AT_OUT;
                write_address <= out + times(job_out, 64 * PARTIAL_BEATS);
                write_beats <= PARTIAL_BEATS;
            end
            OUT: if (core_valid && core_ready && core_last) begin
                state <= JOB;
                job <= job + 1;
                entries_on <= 0;
                entries_started <= 0;
            end
            STOP: if (list_idle && quiet && writer_idle) begin
                state <= STATUS;
                core_reset <= 1;
                if (failed) begin
                    code <= ssdkv_fpga::STATUS_MEMORY;
                    place <= failed_place;
                end
            end
            STATUS: begin
                state <= STATUS_WAIT;
                write_status <= 1;
                write_start <= 1;
                written <= AT_STATUS;
                write_address <= status;
                write_beats <= 1;
            end
            STATUS_WAIT: if (!write_start && writer_idle) begin
                state <= IDLE;
                done <= 1;
                write_status <= 0;
                entries_on <= 0;
                entries_started <= 0;
            end
            default: state <= IDLE;
        endcase
    end
endmodule
`default_nettype wire
